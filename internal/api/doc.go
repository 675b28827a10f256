// Package api is the agent's HTTP API over a Unix socket: the types that travel, the server's
// handler, the client, and the Prometheus metrics. docs/protocols/agent-api.md is normative for all
// of them.
//
// The package decides nothing: a handler decodes and checks a request's form, calls the [Agent] and
// encodes the answer. Whoever can open the socket (mode 0600) may do everything, so there is no
// further authentication.
package api
