package paths

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"time"

	"github.com/quic-go/quic-go"

	"heddle.dev/heddle/internal/testutil"
)

// As these, this test's program is one end of a QUIC connection: QUIC-SERVER ADDRESS echoes
// streams, QUIC-CLIENT ADDRESS sends one and checks what comes back.
const (
	quicServer = "quic-server"
	quicClient = "quic-client"
	quicBytes  = 4 << 20
)

// runQUIC acts as one of them if the arguments say so.
func runQUIC(args []string) (ran bool, err error) {
	if len(args) != 3 {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), testutil.WaitTimeout)
	defer cancel()
	switch args[1] {
	case quicServer:
		return true, serveQUIC(ctx, args[2])
	case quicClient:
		return true, dialQUIC(ctx, args[2])
	}
	return false, nil
}

func serveQUIC(ctx context.Context, addr string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	cert, err := x509.CreateCertificate(rand.Reader, &template, &template, &key.PublicKey, key)
	if err != nil {
		return err
	}
	l, err := quic.ListenAddr(addr, &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{cert}, PrivateKey: key}}, NextProtos: []string{"echo"},
	}, nil)
	if err != nil {
		return err
	}
	defer l.Close()
	fmt.Println("ready")
	for {
		c, err := l.Accept(ctx)
		if err != nil {
			return err
		}
		s, err := c.AcceptStream(ctx)
		if err != nil {
			return err
		}
		if _, err := io.Copy(s, s); err != nil {
			return err
		}
		if err := s.Close(); err != nil {
			return err
		}
	}
}

func dialQUIC(ctx context.Context, addr string) error {
	// The server's key is its own: the test is of the path.
	c, err := quic.DialAddr(ctx, addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"echo"}}, nil)
	if err != nil {
		return err
	}
	s, err := c.OpenStreamSync(ctx)
	if err != nil {
		return err
	}
	sent := make([]byte, quicBytes)
	if _, err := rand.Read(sent); err != nil {
		return err
	}
	wrote := make(chan error, 1)
	go func() {
		_, err := s.Write(sent)
		wrote <- errors.Join(err, s.Close())
	}()
	got, err := io.ReadAll(s)
	if err := errors.Join(err, <-wrote); err != nil {
		return err
	}
	if !bytes.Equal(got, sent) {
		return fmt.Errorf("%d bytes came back, of %d, and not the same", len(got), len(sent))
	}
	fmt.Printf("%d bytes came back\n", len(got))
	return c.CloseWithError(0, "")
}
