package loadgen

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
)

// KindRequest is the kind of http's operations.
const KindRequest = "request"

// maxHeader is the longest header of a response that is taken.
const maxHeader = 8 << 10

// httpGet asks for one path again and again on a kept connection, by HTTP/1.1.
type httpGet struct {
	text   []byte // of the request
	reader httpReader
}

func newHTTP(s settings, _ int) exchange {
	return &httpGet{text: fmt.Appendf(nil, "GET %s HTTP/1.1\r\nHost: heddle\r\n\r\n", s.path)}
}

func (h *httpGet) request(b []byte) ([]byte, string) {
	h.reader = httpReader{header: h.reader.header[:0]}
	return append(b, h.text...), KindRequest
}

func (h *httpGet) feed(b []byte) (bool, error) { return h.reader.feed(b) }

func (h *httpGet) closing() bool { return h.reader.closing }

func (h *httpGet) hits() int { return 0 }

// httpReader reads one response with a Content-Length, in whatever pieces it comes.
type httpReader struct {
	header  []byte // until its end has come
	body    bool   // it has
	left    int    // of the body
	closing bool   // the server says that it will close the connection
}

func (r *httpReader) feed(b []byte) (done bool, err error) {
	if !r.body {
		before := len(r.header)
		r.header = append(r.header, b[:min(len(b), maxHeader-before)]...)
		end := bytes.Index(r.header, []byte("\r\n\r\n"))
		if end < 0 {
			if len(r.header) == maxHeader {
				return false, fmt.Errorf("HTTP: a header of more than %d bytes", maxHeader)
			}
			return false, nil
		}
		if err := r.takeHeader(r.header[:end]); err != nil {
			return false, err
		}
		r.body = true
		b = b[end+len("\r\n\r\n")-before:]
	}
	if len(b) > r.left {
		return false, errors.New("HTTP: more than the response")
	}
	r.left -= len(b)
	return r.left == 0, nil
}

// takeHeader checks the status and finds the length of the body.
func (r *httpReader) takeHeader(header []byte) error {
	status, rest, _ := bytes.Cut(header, []byte("\r\n"))
	if f := bytes.Fields(status); len(f) < 2 || string(f[1]) != "200" {
		return fmt.Errorf("HTTP: %q: want status 200", status)
	}
	length := -1
	for line := range bytes.SplitSeq(rest, []byte("\r\n")) {
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimSpace(value)
		switch {
		case bytes.EqualFold(name, []byte("Content-Length")):
			n, err := strconv.Atoi(string(value))
			if err != nil || n < 0 {
				return fmt.Errorf("HTTP: %q: no length", line)
			}
			length = n
		case bytes.EqualFold(name, []byte("Connection")):
			r.closing = bytes.EqualFold(value, []byte("close"))
		}
	}
	if length < 0 {
		return errors.New("HTTP: no Content-Length")
	}
	r.left = length
	return nil
}
