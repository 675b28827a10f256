// Package intercept answers trapped socket() calls with sockets made in the agent's own network namespace.
//
// An OCI runtime installs a seccomp filter whose listener it hands to the agent over a Unix socket
// (handoff.go). Every listener gets one goroutine on one OS thread (listener.go) that receives the trapped
// calls, reads their integer arguments (classify.go) and answers each: with a ready socket (stock.go), with
// an errno (failure.go), or by letting the kernel go on with the call in the container's own namespace.
// kernel.go holds the raw system calls. Package park keeps listeners alive while no agent runs.
//
// Three facts of the kernel shape the package:
//
//   - Only integers of the call are read, never the caller's memory, so nothing can change between the
//     look and the answer; and letting a call continue is safe because it then acts on the container's
//     own namespace only.
//   - When a signal interrupts an ADDFD with the SEND flag, the caller is told "0", a descriptor it never got.
//     So the answering threads run with every signal blocked, the Go runtime's preemption signal included.
//     SIGKILL, a crash or os.Exit still do it to the call being answered at that moment (about one
//     in eight kills under an unbroken stream of calls). End an agent by (*Server).Close, which lets each
//     answer finish. Injecting and answering in two steps would not have this flaw, but takes two more
//     context switches (about 5 us) and leaves a stray descriptor in a caller that a signal interrupts between.
//   - poll before RECV costs no measurable time, so the loops do that on every kernel: it tells a filter
//     without users from a caller that was killed, and it lets Close end a loop.
//   - When the last descriptor of a listener closes, trapped calls fail with ENOSYS. See package park.
package intercept
