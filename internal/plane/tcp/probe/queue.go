package probe

import (
	"container/heap"
	"time"
)

// queue has peers in the order in which their rounds are due.
type queue []*peer

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].next.Before(q[j].next) }

func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].place, q[j].place = i, j
}

// Push implements heap.Interface.
func (q *queue) Push(x any) {
	p := x.(*peer)
	p.place = len(*q)
	*q = append(*q, p)
}

// Pop implements heap.Interface.
func (q *queue) Pop() any {
	last := len(*q) - 1
	p := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	return p
}

// queues are those whose round a connect has asked for, which go first, and the others. A peer
// whose round goes on is in neither.
type queues struct{ wanted, ordinary queue }

func (q *queues) of(p *peer) *queue {
	if p.wanted {
		return &q.wanted
	}
	return &q.ordinary
}

func (q *queues) put(p *peer)    { heap.Push(q.of(p), p) }
func (q *queues) remove(p *peer) { heap.Remove(q.of(p), p.place) }

// take removes and gives the peer whose round is to begin, or says how long there is none, at most
// wait.
func (q *queues) take(now time.Time, wait time.Duration) (*peer, time.Duration) {
	for _, one := range []*queue{&q.wanted, &q.ordinary} {
		if one.Len() == 0 {
			continue
		}
		if d := (*one)[0].next.Sub(now); d > 0 {
			wait = min(wait, d)
			continue
		}
		return heap.Pop(one).(*peer), 0
	}
	return nil, wait
}
