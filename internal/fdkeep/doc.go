// Package fdkeep keeps seccomp listeners open while no agent runs.
//
// A trapped call fails with ENOSYS as soon as the last descriptor of its listener closes. So a
// small process of its own, the fd keeper, keeps a duplicate of every listener the agent serves,
// under a key and with a blob of metadata. While the agent is away calls wait, but those that the
// agent has said may continue: these the keeper has the kernel go on with (away.go). The next agent
// fetches the listeners and answers. The keeper drops a listener by itself once its filter has no
// users left.
//
// Beside each listener the keeper keeps a page of memory (a memfd) in which the agent has the
// kernel put the call it is about to answer. A call that an agent received but did not live to
// answer would be lost to its caller otherwise: the kernel reports a call once.
//
// The agent also keeps the socket on which runtimes hand listeners over, under a key of its own:
// for the keeper it is one more entry. While the agent is away the kernel queues what runtimes send
// there.
//
// Keeper and client talk over a Unix SEQPACKET socket: one request, one or more replies, hang up.
package fdkeep
