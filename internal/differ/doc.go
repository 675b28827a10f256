// Package differ runs small socket programs in two modes of the lab and compares what they saw: the
// test of the rule that a program cannot tell a Heddle container from a plain one.
//
// A Program is a list of steps that two processes (actors a and b, and a child of each) carry out
// one at a time. It is data: generated from a seed (package generate), kept as JSON, shrunk by
// leaving steps out. Descriptors are slots, addresses and ports are symbols, and a step on an empty
// slot is a call with a descriptor that is not open: so any part of a program is a program, which
// is what makes shrinking simple.
//
// A worker (package executor) is a process in a container that carries out steps. The Hub has
// workers in every place and mode, and runs programs on them. Between two steps it waits until
// nothing changes any more at any socket; what changed becomes part of the trace. A call that
// blocks is left pending while other steps go on; what it gives in the end, and after which step,
// is part of the trace as well. What is pending at the end is interrupted by a signal.
//
// Only ports the kernel chose are normalised, and the names of the containers' addresses. A
// difference counts only if it is still there when both modes run again, slowly: packets can be
// late on a busy machine.
package differ
