package ui

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
)

// Bounds of what is asked of all nodes: they hold for all who look together.
const (
	askAtOnce   = 64  // nodes asked at the same time
	askASecond  = 256 // questions to nodes: those of a network of 5,000 take 20 s
	askTimeout  = 5 * time.Second
	maxAnswer   = 8 << 20 // bytes of a node's
	maxRounds   = 8       // different questions that are asked again and again
	roundEvery  = 1500 * time.Millisecond
	firstAnswer = 300 * time.Millisecond // how long a browser waits for more than there is
	nobodyLooks = 10 * time.Second       // after which a round ends
	maxSilent   = 20                     // nodes that are named as such
)

// pace lets questions to nodes go at a rate, so many at a time, whoever asks them.
type pace struct {
	turns chan struct{}
	mu    sync.Mutex // guards next
	next  time.Time  // when the next one may go
}

func newPace() *pace { return &pace{turns: make(chan struct{}, askAtOnce)} }

// take waits for a turn, which is to be given back.
func (p *pace) take(ctx context.Context) error {
	select {
	case p.turns <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	wait := time.NewTimer(p.wait(time.Now()))
	defer wait.Stop()
	select {
	case <-wait.C:
		return nil
	case <-ctx.Done():
		p.give()
		return ctx.Err()
	}
}

func (p *pace) give() { <-p.turns }

// wait says how long a question that comes now has to wait. As many as may be under way may go at
// once: the first ones of a page in front of a large network are not to take all of the processor.
func (p *pace) wait(now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if earliest := now.Add(-askAtOnce * time.Second / askASecond); p.next.Before(earliest) {
		p.next = earliest
	}
	p.next = p.next.Add(time.Second / askASecond)
	return p.next.Sub(now)
}

// gather puts the answers of nodes together, in bounded memory.
type gather interface {
	// read decodes an answer, and gives what adds it. One goroutine at a time calls add.
	read(body []byte) (add func(node string), err error)
}

// round asks all nodes one question, again and again for as long as somebody looks.
type round struct {
	target string
	fresh  func(before gather) gather // before: of the round before; nil: there was none
	mu     sync.Mutex                 // guards the rest
	looked time.Time
	began  time.Time
	now    *progress // under way; nil: none is
	whole  *progress // the last that has ended
	ended  chan struct{}
}

// progress is what a round has so far.
type progress struct {
	gathered gather
	Progress
}

// Progress says of whom an answer is.
type Progress struct {
	Nodes    int `json:"nodes"`
	Answered int `json:"answered"`
	// Whole: all nodes have been asked.
	Whole bool `json:"whole"`
	// Silent says of nodes that have not answered why; More of them are not named.
	Silent map[string]string `json:"silent"`
	More   int               `json:"silent_more"`
}

func (p *Progress) without(node string, err error) {
	if p.Silent == nil {
		p.Silent = make(map[string]string)
	}
	if _, named := p.Silent[node]; !named && len(p.Silent) >= maxSilent {
		p.More++
		return
	}
	p.Silent[node] = fmt.Sprintf("%.300s", err)
}

// rounds are those that somebody looks at.
type rounds struct {
	mu   sync.Mutex // guards byKey
	list map[string]*round
}

// round gives that of a question. If there are as many as may be, the one that nobody has looked at
// for longest goes.
func (rs *rounds) round(target string, fresh func(gather) gather) *round {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if r := rs.list[target]; r != nil {
		return r
	}
	if rs.list == nil {
		rs.list = make(map[string]*round)
	}
	if len(rs.list) >= maxRounds {
		oldest, since := "", time.Now().Add(time.Hour)
		for key, r := range rs.list {
			if at := r.lastLook(); at.Before(since) {
				oldest, since = key, at
			}
		}
		rs.list[oldest].leave()
		delete(rs.list, oldest)
	}
	r := &round{target: target, fresh: fresh, looked: time.Now()}
	rs.list[target] = r
	return r
}

func (r *round) lastLook() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.looked
}

// leave has the round end: nobody looks.
func (r *round) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.looked = time.Time{}
}

// look gives show what the round has, beginning another one if it is time.
func (s *server) look(ctx context.Context, r *round, show func(gather, Progress)) error {
	nodes, err := s.nodeList(ctx)
	if err != nil {
		return err
	}
	r.mu.Lock()
	if time.Since(r.looked) > s.patience { // what is there is not of now
		r.whole = nil
	}
	r.looked = time.Now()
	if r.now == nil && (r.whole == nil || time.Since(r.began) >= roundEvery) {
		s.begin(r, nodes)
	}
	ended, enough := r.ended, s.enough
	if r.whole != nil {
		enough /= 2 // the next look will have it
	}
	r.mu.Unlock()
	wait := time.NewTimer(enough)
	defer wait.Stop()
	select {
	case <-ended:
	case <-wait.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.whole
	if p == nil {
		p = r.now
	}
	if p == nil { // another question has taken its place
		return &api.Error{Code: api.CodeExhausted, Message: fmt.Sprintf("more than %d different questions are looked at", maxRounds), Remedy: "close a page, or wait a moment"}
	}
	said := p.Progress
	said.Silent = make(map[string]string)
	for _, of := range []*progress{p, r.now} { // what the next one has found out already
		if of == nil {
			continue
		}
		for node, why := range of.Silent {
			said.without(node, errors.New(why))
		}
	}
	show(p.gathered, said)
	return nil
}

// begin begins a round. The caller holds r.mu.
func (s *server) begin(r *round, nodes []api.Node) {
	var before gather
	if r.whole != nil {
		before = r.whole.gathered
	}
	p := &progress{r.fresh(before), Progress{Nodes: len(nodes)}}
	r.now, r.began, r.ended = p, time.Now(), make(chan struct{})
	go s.run(r, p, nodes, r.ended)
}

// run asks the nodes, and ends early if nobody looks any more.
func (s *server) run(r *round, p *progress, nodes []api.Node, ended chan struct{}) {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	var wg sync.WaitGroup
	left := false
	for _, n := range nodes {
		if n.State == api.NodeDead {
			r.note(p, n.Name, nil, errDead)
			continue
		}
		if left = time.Since(r.lastLook()) > s.patience || s.pace.take(ctx) != nil; left {
			cancel()
			break
		}
		wg.Go(func() {
			defer s.pace.give()
			add, err := s.question(ctx, n.Name, r.target, p.gathered)
			r.note(p, n.Name, add, err)
		})
	}
	wg.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now = nil
	if !left {
		p.Whole = true
		r.whole = p
	} else if time.Since(r.looked) <= s.patience && s.ctx.Err() == nil { // somebody came while it ended
		s.begin(r, nodes)
	}
	close(ended)
}

// errDead is why a node is not asked.
var errDead = errors.New("neither its agent nor the node answers: `heddle nodes` says since when")

func (r *round) note(p *progress, node string, add func(string), err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		p.without(node, err)
		return
	}
	p.Answered++
	add(node)
}

// question puts a question to one node.
func (s *server) question(ctx context.Context, node, target string, g gather) (add func(string), err error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	body, err := s.ask(ctx, node, target)
	if err != nil {
		return nil, err
	}
	if add, err = g.read(body); err != nil {
		return nil, fmt.Errorf("its answer is none that this version understands: %w", err)
	}
	return add, nil
}

// olderTargets are what an agent of a version before is asked instead.
var olderTargets = map[string]string{briefStatus: "/v1/status"}

// errOld is why a node's agent has no answer.
var errOld = errors.New("its agent is of a version that does not know the question: replace it by one of this version")

// ask gives what a node's agent says.
func (s *server) ask(ctx context.Context, node, target string) ([]byte, error) {
	resp, err := s.Agent.AskNode(ctx, node, target)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }() // it has been read
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return nil, err
	}
	if len(body) > maxAnswer {
		return nil, errors.New("its answer is too long: choose less")
	}
	if resp.StatusCode == http.StatusOK {
		return body, nil
	}
	var said struct{ Error *api.Error }
	known := json.Unmarshal(body, &said) == nil && said.Error != nil
	if older := olderTargets[target]; older != "" && resp.StatusCode == http.StatusBadRequest {
		return s.ask(ctx, node, older)
	}
	switch {
	case !known && resp.StatusCode == http.StatusNotFound: // as agents answer each other
		return nil, errOld
	case known:
		return nil, said.Error
	}
	return nil, errors.New(strings.ToLower(resp.Status))
}
