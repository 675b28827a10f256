package node

import (
	"context"
	"fmt"
	"time"

	"heddle.dev/heddle/internal/api"
)

// How a thing is put back that another program takes away again and again. Guards are down
// meanwhile: it does not wait longer than what is documented, a second.
const (
	fightSoon   = 10 * time.Second // it did not last
	fightPeace  = time.Minute      // after which all is forgotten
	fightTimes  = 10               // so often it is put back at once, and each time is told
	fightPause  = 100 * time.Millisecond
	fightLonger = time.Second
)

// fight is what is known of a thing that was put back, and did not last. One goroutine uses it.
type fight struct {
	times       int // that it was put back, and not for long
	since, last time.Time
	told        time.Time // when the log was told last
}

// wait gives how long after now the thing may be put back again.
func (f *fight) wait(now time.Time) time.Duration {
	if f.times <= fightTimes {
		return 0
	}
	pause := min(fightPause<<min(f.times-fightTimes, 10), fightLonger)
	return f.last.Add(pause).Sub(now)
}

// add notes that it was put back now, and reports whether the log is to be told.
func (f *fight) add(now time.Time) (tell bool) {
	if now.Sub(f.last) >= fightPeace {
		*f = fight{since: now}
	}
	if now.Sub(f.last) < fightSoon || f.times == 0 {
		f.times++
	}
	f.last = now
	if f.times <= fightTimes {
		return true
	}
	if now.Sub(f.told) < fightPeace {
		return false
	}
	f.told = now
	return true
}

// pause waits until a thing may be put back.
func (m *mender) pause(ctx context.Context, what api.MendedThing) {
	if wait := m.fights[what].wait(time.Now()); wait > 0 {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// putBack tells that a thing is back, and of whom takes it away again and again.
func (m *mender) putBack(what api.Mended) {
	m.mended.add(what)
	f := m.fights[what.What]
	tell := f.add(time.Now())
	if f.times <= fightTimes {
		m.log.Warn("was taken away by another program, and is back", "what", what.What, "gone", what.Gone, "by", what.By, "remedy", remedyOfMending)
		return
	}
	err := fmt.Errorf("taken away by another program %d times since %s, and put back", f.times, f.since.UTC().Format(time.RFC3339))
	if what.By != "" {
		err = fmt.Errorf("%w; last by %s", err, what.By)
	}
	m.faults.Set(what.What.Fought(), "", err)
	if tell {
		m.log.Warn("is taken away by another program again and again", "what", what.What, "gone", what.Gone, "err", err, "remedy", remedyOfMending)
	}
}

// lasts notes that a thing is as it should be.
func (m *mender) lasts(what api.MendedThing) {
	f := m.fights[what]
	if f.times == 0 || time.Since(f.last) < fightPeace {
		return
	}
	*f = fight{}
	if m.faults.Clear(what.Fought(), "") {
		m.log.Info("is not taken away any more", "what", what)
	}
}
