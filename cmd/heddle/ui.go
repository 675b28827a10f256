package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/ui"
)

// minToken is the least length of a token that an operator chooses.
const minToken = 16

// uiFlags say where the page is served, and to whom.
type uiFlags struct {
	agentFlags
	listen, socket, tokenFile, tlsCert, tlsKey string
}

func newUICmd() *cobra.Command {
	var f uiFlags
	cmd := &cobra.Command{
		Use:   "ui",
		Short: "Serve a page that shows the whole network to a browser",
		Long: `Serves a page that shows who talks to whom in the whole network, by which path, what was denied and why, and prints its address,
which has a token in it. The page reads and changes nothing. It is served until interrupted.

By default at a port of the loopback address: "ssh -L 17480:127.0.0.1:17480 NODE" brings it to another machine. --socket serves it at a
Unix socket for root instead, without a token. Any other address wants --tls-cert and --tls-key.`,
		Args: cobra.NoArgs, SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return f.run(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.api, "api", "", fmt.Sprintf("the agent's socket (default %s, or that of the lab's first node)", api.DefaultSocket))
	flags.StringVar(&f.lab, "lab", "", "show the network of this lab")
	flags.StringVar(&f.listen, "listen", "127.0.0.1:17480", "address and port to serve the page at")
	flags.StringVar(&f.socket, "socket", "", "Unix socket to serve the page at instead, mode 0600")
	flags.StringVar(&f.tokenFile, "token-file", "", fmt.Sprintf("file with the token, %d characters at least (default: another one each time)", minToken))
	flags.StringVar(&f.tlsCert, "tls-cert", "", "PEM file with the certificate, to serve the page by TLS")
	flags.StringVar(&f.tlsKey, "tls-key", "", "PEM file with the key of --tls-cert")
	return cmd
}

func (f uiFlags) run(ctx context.Context, out, errs io.Writer) error {
	found, err := f.find()
	if err != nil {
		return err
	}
	client := found.clients[0]
	defer client.Close()
	if _, err := ask(ctx, agents{clients: found.clients[:1]}, func(ctx context.Context, c *api.Client) (api.Status, error) { return c.Status(ctx) }); err != nil {
		return err
	}
	token, err := f.token()
	if err != nil {
		return err
	}
	l, address, err := f.open(token)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(out, "%s\n", address); err != nil {
		return errors.Join(err, l.Close())
	}
	return api.ServeOn(ctx, l, ui.Handler(ctx, ui.Config{Agent: client, Token: token, Secure: f.tlsCert != "", Log: slog.New(slog.NewTextHandler(errs, nil))}))
}

// token gives what browsers have to show: "" for a socket of root's.
func (f uiFlags) token() (string, error) {
	switch {
	case f.socket != "" && f.tokenFile != "":
		return "", errors.New("--token-file, --socket: the socket is root's, and has no token; leave one out")
	case f.socket != "":
		return "", nil
	case f.tokenFile == "":
		return rand.Text(), nil
	}
	raw, err := os.ReadFile(f.tokenFile)
	if err != nil {
		return "", fmt.Errorf("--token-file: %w", err)
	}
	token := strings.TrimSpace(string(raw))
	if len(token) < minToken || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune(`",;\&#%+`, r) }) {
		return "", fmt.Errorf("--token-file %s: want %d characters at least, letters and digits; `openssl rand -hex 16` makes one", f.tokenFile, minToken)
	}
	return token, nil
}

// open opens what the page is served at, and gives its address.
func (f uiFlags) open(token string) (net.Listener, string, error) {
	if (f.tlsCert == "") != (f.tlsKey == "") {
		return nil, "", errors.New("--tls-cert, --tls-key: give both or neither")
	}
	if f.socket != "" {
		if f.tlsCert != "" {
			return nil, "", errors.New("--tls-cert, --socket: a Unix socket needs no TLS; leave one out")
		}
		l, err := api.Listen(f.socket)
		return l, "unix:" + f.socket, err
	}
	at, err := netip.ParseAddrPort(f.listen)
	if err != nil {
		return nil, "", fmt.Errorf("--listen %q: want ADDRESS:PORT, such as 127.0.0.1:17480", f.listen)
	}
	if !at.Addr().IsLoopback() && f.tlsCert == "" {
		return nil, "", fmt.Errorf("--listen %s: others could read the token on their network: give --tls-cert and --tls-key, or serve at 127.0.0.1 and use ssh -L", at)
	}
	scheme, config := "http", (*tls.Config)(nil)
	if f.tlsCert != "" {
		pair, err := tls.LoadX509KeyPair(f.tlsCert, f.tlsKey)
		if err != nil {
			return nil, "", fmt.Errorf("--tls-cert, --tls-key: %w", err)
		}
		scheme, config = "https", &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}
	}
	l, err := net.Listen("tcp", at.String())
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, "", fmt.Errorf("--listen %s: something else is there; choose another port", at)
	}
	if err != nil {
		return nil, "", fmt.Errorf("--listen: %w", err)
	}
	address := fmt.Sprintf("%s://%s/?token=%s", scheme, l.Addr(), token)
	if config != nil {
		l = tls.NewListener(l, config)
	}
	return l, address, nil
}
