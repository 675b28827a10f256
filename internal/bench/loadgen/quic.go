package loadgen

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math"
	"net"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/quic-go/quic-go"
	"golang.org/x/sys/unix"
)

// The protocol on QUIC: a client opens a stream, says by 8 bytes how many it wants, and gets them.
const (
	quicProtocol = "heddle-bench"
	quicRequest  = 8
	quicChunk    = 64 << 10
)

// Stream is what quic measures: bytes on one stream.
type Stream struct {
	Bytes    int64   `json:"bytes"`
	ElapsedS float64 `json:"elapsed_s"`
	BusyCPUS float64 `json:"busy_cpu_s"` // whole machine, see CPUTime
}

// quicSettings puts this process on one processor, all threads of it, and has garbage collected:
// unlike the loops of this package, the library leaves some.
func quicSettings(s settings) error {
	debug.SetGCPercent(100)
	log.SetOutput(io.Discard) // the library tells there that buffers are as they are for everybody
	if s.cpu == anyCPU {
		return nil
	}
	runtime.GOMAXPROCS(1)
	var set unix.CPUSet
	set.Set(s.cpu)
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return fmt.Errorf("find own threads: %w", err)
	}
	for _, each := range threads {
		id, err := strconv.Atoi(each.Name())
		if err != nil {
			return fmt.Errorf("find own threads: %w", err)
		}
		if err := unix.SchedSetaffinity(id, &set); err != nil && err != unix.ESRCH {
			return fmt.Errorf("--cpu %d: run on this processor: %w", s.cpu, err)
		}
	}
	return nil
}

// evenBuffers gives a socket the buffers that every program may have: the library takes more where
// it is privileged, as the modes without containers are.
func evenBuffers(c *net.UDPConn) error {
	return errors.Join(c.SetReadBuffer(datagramBuffer), c.SetWriteBuffer(datagramBuffer))
}

// quicServer answers requests until its standard input or its lifetime ends.
func quicServer(ctx context.Context, s settings, streams Streams) (err error) {
	address, err := netip.ParseAddrPort(s.listen)
	if err != nil {
		return fmt.Errorf("--listen %q: want ADDRESS:PORT", s.listen)
	}
	if err := quicSettings(s); err != nil {
		return err
	}
	pair, err := selfSigned()
	if err != nil {
		return err
	}
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(address))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	transport := &quic.Transport{Conn: conn}
	defer func() { err = errors.Join(err, transport.Close()) }()
	listener, err := transport.Listen(&tls.Config{Certificates: []tls.Certificate{pair}, NextProtos: []string{quicProtocol}},
		&quic.Config{MaxIncomingStreams: 1 << 20})
	if err != nil {
		return err
	}
	if err := evenBuffers(conn); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.lifetime)
	defer cancel()
	go func() {
		select {
		case <-ended(streams.In):
		case <-ctx.Done():
		}
		cancel()
	}()
	if _, err := fmt.Fprintln(streams.Out, Ready); err != nil {
		return err
	}
	for {
		c, err := listener.Accept(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		go serveQUIC(ctx, c)
	}
}

// serveQUIC answers a connection's requests, one after the other. Its end is the client's.
func serveQUIC(ctx context.Context, c *quic.Conn) {
	chunk := make([]byte, quicChunk)
	var request [quicRequest]byte
	for {
		stream, err := c.AcceptStream(ctx)
		if err != nil {
			return
		}
		if _, err := io.ReadFull(stream, request[:]); err != nil {
			return
		}
		for left := binary.LittleEndian.Uint64(request[:]); left > 0; {
			n, err := stream.Write(chunk[:min(left, quicChunk)])
			if err != nil {
				return
			}
			left -= uint64(n)
		}
		if err := stream.Close(); err != nil {
			return
		}
	}
}

// quicClient makes an action of a measurement on a connection of QUIC.
func quicClient[R any](measure func(context.Context, *quic.Conn, settings) (R, error)) action {
	return func(ctx context.Context, s settings, streams Streams) (err error) {
		to, err := netip.ParseAddrPort(s.to)
		if err != nil {
			return fmt.Errorf("--to %q: want ADDRESS:PORT", s.to)
		}
		if err := quicSettings(s); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, s.duration+slack)
		defer cancel()
		conn, err := net.ListenUDP("udp", nil)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, conn.Close()) }()
		transport := &quic.Transport{Conn: conn}
		defer func() { err = errors.Join(err, transport.Close()) }()
		// The server's key is its own: what is measured is the way.
		c, err := transport.Dial(ctx, net.UDPAddrFromAddrPort(to), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{quicProtocol}}, nil)
		if err != nil {
			return fmt.Errorf("connect: %w", err)
		}
		defer func() { err = errors.Join(err, c.CloseWithError(0, "")) }()
		if err := evenBuffers(conn); err != nil {
			return err
		}
		r, err := measure(ctx, c, s)
		if err != nil {
			return err
		}
		return json.NewEncoder(streams.Out).Encode(r)
	}
}

// ask opens a stream and asks for so many bytes on it.
func ask(ctx context.Context, c *quic.Conn, bytes uint64) (*quic.Stream, error) {
	stream, err := c.OpenStreamSync(ctx)
	if err != nil {
		return nil, fmt.Errorf("open stream: %w", err)
	}
	var request [quicRequest]byte
	binary.LittleEndian.PutUint64(request[:], bytes)
	if _, err := stream.Write(request[:]); err != nil {
		return nil, fmt.Errorf("ask: %w", err)
	}
	return stream, stream.Close()
}

// quicStream reads one stream for a while, after a warm-up of a fifth of that, in which the
// congestion window grows.
func quicStream(ctx context.Context, c *quic.Conn, s settings) (Stream, error) {
	stream, err := ask(ctx, c, math.MaxUint64)
	if err != nil {
		return Stream{}, err
	}
	chunk := make([]byte, quicChunk)
	read := func(d time.Duration) (total int64, err error) {
		for start := time.Now(); time.Since(start) < d; {
			n, err := stream.Read(chunk)
			if err != nil {
				return 0, fmt.Errorf("read: %w", err)
			}
			total += int64(n)
		}
		return total, nil
	}
	if _, err := read(s.duration / 5); err != nil {
		return Stream{}, fmt.Errorf("warm up: %w", err)
	}
	var total int64
	elapsed, busy, err := metered(func() (err error) { total, err = read(s.duration); return err })
	stream.CancelRead(0)
	return Stream{Bytes: total, ElapsedS: elapsed.Seconds(), BusyCPUS: busy.Seconds()}, err
}

// quicTrips makes requests for s.size bytes one after the other, each on a stream of its own, as
// HTTP/3 does.
func quicTrips(ctx context.Context, c *quic.Conn, s settings) (RoundTrips, error) {
	back := make([]byte, s.size)
	return measureTrips(s, func() error {
		stream, err := ask(ctx, c, uint64(s.size))
		if err != nil {
			return err
		}
		if _, err := io.ReadFull(stream, back); err != nil {
			return fmt.Errorf("read: %w", err)
		}
		if n, err := stream.Read(back); n != 0 || !errors.Is(err, io.EOF) {
			return fmt.Errorf("read the end of a stream: %d bytes, %w", n, err)
		}
		return nil
	})
}
