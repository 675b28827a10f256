// Command go-http is an HTTP server and client as people write them in Go, linked statically:
//
//	go-http server ADDRESS:PORT
//	go-http client ADDRESS:PORT
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// Sizes of what is fetched and sent.
const (
	largeBytes  = 8 << 20
	uploadBytes = 1 << 20
	clients     = 20
	requests    = 20
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 3 {
		log.Fatal("usage: go-http server|client ADDRESS:PORT")
	}
	var err error
	switch os.Args[1] {
	case "server":
		err = serve(os.Args[2])
	case "client":
		err = fetch("http://" + os.Args[2])
	default:
		err = fmt.Errorf("%s: want server or client", os.Args[1])
	}
	if err != nil {
		log.Fatal(err)
	}
}

func pattern(n int) []byte {
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(i * 7 % 251)
	}
	return data
}

func host(addr string) string {
	h, _, err := net.SplitHostPort(addr)
	if err != nil {
		return err.Error()
	}
	return h
}

func serve(addr string) error {
	large := pattern(largeBytes)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /seen", func(w http.ResponseWriter, r *http.Request) {
		own := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
		fmt.Fprintf(w, "you are %s, I am %s, you asked for %s\n", host(r.RemoteAddr), own, r.Host)
	})
	mux.HandleFunc("GET /large", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(large) })
	mux.HandleFunc("POST /upload", func(w http.ResponseWriter, r *http.Request) {
		sum := sha256.New()
		n, err := io.Copy(sum, r.Body)
		fmt.Fprintf(w, "%d bytes from %s, SHA-256 %x, error %v\n", n, host(r.RemoteAddr), sum.Sum(nil), err)
	})
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	fmt.Println("listening on", listener.Addr())
	server := &http.Server{Handler: mux}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go func() {
		<-ctx.Done()
		_ = server.Close()
	}()
	if err := server.Serve(listener); err != http.ErrServerClosed {
		return err
	}
	fmt.Println("closed")
	return nil
}

// get gives what is at url and the ends of the connection it came over.
func get(client *http.Client, method, url string, body io.Reader) (string, error) {
	var ends string
	ctx := httptrace.WithClientTrace(context.Background(), &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) {
		ends = fmt.Sprintf("%s -> %s", host(info.Conn.LocalAddr().String()), info.Conn.RemoteAddr())
	}})
	request, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return "", err
	}
	response, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		return "", err
	}
	text := fmt.Sprintf("%d bytes, SHA-256 %x\n", len(data), sha256.Sum256(data))
	if len(data) < 1000 {
		text = string(data)
	}
	return fmt.Sprintf("%s %s: %s, %s, %s", method, url, ends, response.Status, text), nil
}

func fetch(base string) error {
	client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: clients}}
	for _, path := range []string{"/seen", "/large", "/none"} {
		out, err := get(client, http.MethodGet, base+path, nil)
		if err != nil {
			return err
		}
		fmt.Print(out)
	}
	out, err := get(client, http.MethodPost, base+"/upload", bytes.NewReader(pattern(uploadBytes)))
	if err != nil {
		return err
	}
	fmt.Print(out)
	return fetchAtOnce(client, base+"/seen")
}

// fetchAtOnce has many goroutines ask, half of them over a new connection each time.
func fetchAtOnce(client *http.Client, url string) error {
	fresh := &http.Client{Timeout: client.Timeout, Transport: &http.Transport{DisableKeepAlives: true}}
	var wg sync.WaitGroup
	var mu sync.Mutex // guards answers and failed
	answers := make(map[string]int)
	var failed error
	for i := range clients {
		use := client
		if i%2 == 1 {
			use = fresh
		}
		wg.Go(func() {
			for range requests {
				out, err := get(use, http.MethodGet, url, nil)
				mu.Lock()
				answers[out]++
				if err != nil {
					failed = err
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	for out, n := range answers {
		fmt.Printf("%d times %s", n, out)
	}
	return failed
}
