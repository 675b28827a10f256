package loadgen

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
)

// What memtier_benchmark does unless told otherwise: ten million keys at random, 32 bytes, one SET
// to ten GETs.
const (
	memcacheKeys   = 10_000_000
	memcacheGets   = 10 // to one SET
	memcachePrefix = "memtier-"
	maxLine        = 512 // of an answer
	maxValue       = 1 << 20
)

// The kinds of memcache's operations.
const (
	KindSet = "set"
	KindGet = "get"
)

// memcache speaks memcached's text protocol (https://github.com/memcached/memcached/blob/master/doc/protocol.txt).
type memcache struct {
	value    []byte
	random   uint64 // state of xorshift64
	position int    // in the pattern of one SET and ten GETs
	found    int
	reader   memcacheReader
}

func newMemcache(s settings, number int) exchange {
	// Each connection draws its own keys, the same ones in every run.
	return &memcache{value: bytes.Repeat([]byte{'x'}, s.size), random: uint64(number)*0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D}
}

func (m *memcache) request(b []byte) ([]byte, string) {
	m.random ^= m.random << 13
	m.random ^= m.random >> 7
	m.random ^= m.random << 17
	set := m.position == 0
	m.position = (m.position + 1) % (memcacheGets + 1)
	m.reader = memcacheReader{set: set, line: m.reader.line[:0]}
	if !set {
		b = append(append(b, "get "...), memcachePrefix...)
		b = strconv.AppendUint(b, m.random%memcacheKeys, 10)
		return append(b, "\r\n"...), KindGet
	}
	b = append(append(b, "set "...), memcachePrefix...)
	b = strconv.AppendUint(b, m.random%memcacheKeys, 10)
	b = append(b, " 0 0 "...)
	b = strconv.AppendInt(b, int64(len(m.value)), 10)
	b = append(b, "\r\n"...)
	return append(append(b, m.value...), "\r\n"...), KindSet
}

func (m *memcache) feed(b []byte) (bool, error) {
	done, err := m.reader.feed(b)
	if done && m.reader.hit {
		m.found++
	}
	return done, err
}

func (m *memcache) closing() bool { return false }

func (m *memcache) hits() int { return m.found }

// memcacheReader reads one answer, in whatever pieces it comes.
type memcacheReader struct {
	set   bool   // the answer is a SET's
	hit   bool   // a value came
	line  []byte // the start of a line whose end has not come
	skip  int    // bytes of a value, and of the line end behind it, to come
	ended bool
}

var errBeyondAnswer = errors.New("memcached: more than the answer")

func (r *memcacheReader) feed(b []byte) (done bool, err error) {
	for len(b) > 0 {
		if r.ended {
			return false, errBeyondAnswer
		}
		if r.skip > 0 {
			n := min(r.skip, len(b))
			r.skip -= n
			b = b[n:]
			continue
		}
		end := bytes.IndexByte(b, '\n')
		if end < 0 {
			end = len(b) - 1
		}
		if len(r.line)+end+1 > maxLine {
			return false, fmt.Errorf("memcached: a line of more than %d bytes", maxLine)
		}
		r.line = append(r.line, b[:end+1]...)
		b = b[end+1:]
		if r.line[len(r.line)-1] != '\n' {
			break
		}
		if err := r.takeLine(bytes.TrimRight(r.line, "\r\n")); err != nil {
			return false, err
		}
		r.line = r.line[:0]
	}
	return r.ended, nil
}

// takeLine takes a whole line without its end.
func (r *memcacheReader) takeLine(line []byte) error {
	switch {
	case r.set && string(line) == "STORED", !r.set && string(line) == "END":
		r.ended = true
		return nil
	case !r.set && !r.hit && bytes.HasPrefix(line, []byte("VALUE ")):
		size, err := strconv.Atoi(string(line[bytes.LastIndexByte(line, ' ')+1:]))
		if err != nil || size < 0 || size > maxValue {
			return fmt.Errorf("memcached: %q: no size", line)
		}
		r.hit, r.skip = true, size+len("\r\n")
		return nil
	default:
		return fmt.Errorf("memcached: %q: unexpected", line)
	}
}
