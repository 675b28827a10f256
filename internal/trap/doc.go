// Package trap has system calls answered that seccomp filters of containers trap.
//
// An OCI runtime installs a seccomp filter whose listener it hands to the agent over a Unix socket
// (handoff.go). A few threads wait for the calls of all listeners (listener.go, watch.go); one that
// finds a call becomes the listener's reader: a goroutine on an OS thread of its own (reader.go)
// that receives the trapped calls and dispatches each to the Handler that owns it (handler.go),
// which answers by a method of Call (call.go): a descriptor, a value, an errno, or the kernel goes
// on with the call in the container's own namespaces. reason.go has why a call was not answered so.
// kernel.go holds the raw system calls. Package fdkeep keeps listeners alive while no agent runs
// (keep.go).
//
// The package knows endpoints, but nothing of what is answered: TCP sockets are package
// plane/tcp/intercept's, ioctls of devices package trap/ioctl's.
//
// Facts of the kernel shape the package:
//
//   - A call may continue only if no more than its integers were looked at, never the caller's
//     memory, so that nothing can change between the look and the kernel's own; and only if it then
//     acts on the container's own namespace. An ioctl never continues: package trap/ioctl makes it
//     for the caller.
//   - An answer is two steps: ADDFD, which gives the caller the socket, then SEND, which tells it
//     the number. In one step (ADDFD with the flag SEND) the kernel marks the call answered before
//     the caller has taken the descriptor; if the agent's thread gets a signal before that, a
//     SIGKILL at least, ADDFD takes the descriptor back and the caller returns 0, a descriptor it
//     never got. Before ADDFD the agent notes the socket's inode in the call page. The next agent
//     looks for it among the caller's descriptors: there it has only to tell the number. So no
//     answer is lost or given twice (decision 0011). The answering threads block every signal they
//     can, so that none makes them stop between the steps.
//   - A signal that comes between SEND and the caller's next instruction in the kernel takes the
//     answer away, and SEND has succeeded all the same. Of a socket that is one descriptor left
//     open; of an accepted connection it is the connection. Deferred answers are therefore one step
//     where signals have been seen to interrupt callers. The agent's own descriptor then closes
//     after the caller has its, by a thread that hurries (SCHED_FIFO): a caller that has closed
//     first hears from its epoll of a number that it has no more, or has for something else.
//   - poll before RECV costs no measurable time, so the loops do that on every kernel: it tells a
//     filter without users from a caller that was killed, and it lets Close end a loop.
//   - When the last descriptor of a listener closes, trapped calls fail with ENOSYS. See package
//     fdkeep.
package trap
