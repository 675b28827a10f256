package kube

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// lease is a Lease object of the API server, by which one heddle-kube of all nodes keeps the
// policies. Two at a time do no harm, for what they write is the same: the lease is there so that
// not every node writes. client-go has an election of its own, which takes the clientset with all
// groups of the API.
type lease struct {
	client          rest.Interface // coordination.k8s.io
	namespace, name string
	identity        string
	duration        time.Duration // for which a holder that is silent keeps it
	// able says why this one could not lead now; nil if it could. It is asked after lead has given
	// up.
	able func(context.Context) error
	m    *metrics
	log  *slog.Logger

	seen   string // the record as it was last seen, and since when
	seenAt time.Time
}

// run calls lead whenever this one holds the lease, with a context that ends when it does not any
// more, until ctx ends. A lead that returns before has given up: then the lease is left to others.
func (l *lease) run(ctx context.Context, lead func(context.Context)) {
	for ctx.Err() == nil {
		held, err := l.try(ctx)
		if err != nil {
			l.log.Warn("ask for the lease", "lease", l.namespace+"/"+l.name, "error", err)
		}
		if held && l.hold(ctx, lead) {
			l.standBack(ctx)
			continue
		}
		l.pause(ctx)
	}
}

// standBack leaves the lease to others for its duration, and then until this one could lead.
func (l *lease) standBack(ctx context.Context) {
	l.m.givenUp.Inc()
	l.log.Warn("the agent of this node does not take the network's policies: another node is to keep them", "lease", l.namespace+"/"+l.name)
	for said := ""; ; {
		select {
		case <-ctx.Done():
			return
		case <-time.After(l.duration):
		}
		err := l.able(ctx)
		if err == nil {
			l.log.Info("asks for the lease again", "lease", l.namespace+"/"+l.name)
			return
		}
		if err.Error() != said {
			said = err.Error()
			l.log.Warn("does not ask for the lease yet", "error", err)
		}
	}
}

func (l *lease) pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(l.duration / 6):
	}
}

// hold runs lead, and renews the lease, until that has failed for two thirds of its duration, or
// lead has given up.
func (l *lease) hold(ctx context.Context, lead func(context.Context)) (gaveUp bool) {
	leading, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer stop()
		lead(leading)
	}()
	l.log.Info("keeps the network's policies", "lease", l.namespace+"/"+l.name)
	lost := false
	for renewed := time.Now(); !lost; {
		l.pause(leading)
		if leading.Err() != nil {
			break
		}
		held, err := l.try(leading)
		if held {
			renewed = time.Now()
		} else if err == nil || time.Since(renewed) > l.duration*2/3 {
			l.log.Warn("the lease is lost: another node keeps the network's policies", "error", err)
			lost = true
		}
	}
	stop()
	<-done
	if lost {
		return false
	}
	l.release()
	return ctx.Err() == nil
}

// try takes the lease or renews it. False without an error: another one holds it.
func (l *lease) try(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, l.duration/3)
	defer cancel()
	now := metav1.NowMicro()
	seconds := int32(max(l.duration/time.Second, 1))
	var have coordinationv1.Lease
	err := l.client.Get().Namespace(l.namespace).Resource("leases").Name(l.name).Do(ctx).Into(&have)
	if apierrors.IsNotFound(err) {
		made := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: l.name, Namespace: l.namespace},
			Spec: coordinationv1.LeaseSpec{HolderIdentity: &l.identity, LeaseDurationSeconds: &seconds, AcquireTime: &now, RenewTime: &now}}
		err := l.client.Post().Namespace(l.namespace).Resource("leases").Body(made).Do(ctx).Error()
		if apierrors.IsAlreadyExists(err) {
			return false, nil
		}
		return err == nil, err
	}
	if err != nil {
		return false, err
	}
	holder := ""
	if have.Spec.HolderIdentity != nil {
		holder = *have.Spec.HolderIdentity
	}
	// Of other nodes' clocks nothing is believed: a holder is gone when its record has not changed
	// for as long.
	if record := fmt.Sprint(holder, have.ResourceVersion); record != l.seen {
		l.seen, l.seenAt = record, time.Now()
	}
	if holder != "" && holder != l.identity && time.Since(l.seenAt) < l.duration {
		return false, nil
	}
	if holder != l.identity {
		have.Spec.AcquireTime = &now
	}
	have.Spec.HolderIdentity, have.Spec.RenewTime, have.Spec.LeaseDurationSeconds = &l.identity, &now, &seconds
	err = l.client.Put().Namespace(l.namespace).Resource("leases").Name(l.name).Body(&have).Do(ctx).Error()
	if apierrors.IsConflict(err) {
		return false, nil // somebody was faster
	}
	return err == nil, err
}

// release lets the next one take the lease at once. If it cannot, that one waits for the lease's
// duration.
func (l *lease) release() {
	ctx, cancel := context.WithTimeout(context.Background(), l.duration/3)
	defer cancel()
	var have coordinationv1.Lease
	if err := l.client.Get().Namespace(l.namespace).Resource("leases").Name(l.name).Do(ctx).Into(&have); err != nil ||
		have.Spec.HolderIdentity == nil || *have.Spec.HolderIdentity != l.identity {
		return
	}
	have.Spec.HolderIdentity = nil
	_ = l.client.Put().Namespace(l.namespace).Resource("leases").Name(l.name).Body(&have).Do(ctx).Error()
}
