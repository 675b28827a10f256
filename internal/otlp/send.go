package otlp

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/logs/v1"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"

	"heddle.dev/heddle/internal/flow"
)

// maxAnswer bounds what is read of a collector's answer.
const maxAnswer = 64 << 10

// answer is what a try came to.
type answer struct {
	err      error         // nil: the collector has the request
	again    bool          // trying again may help
	after    time.Duration // when the collector wants to be asked again; 0: it does not say
	rejected int           // flows that it did not take, of those it has
	said     string        // why
}

// deliver sends flows, as often as it takes but not for ever. It gives them back if ctx ends
// before.
func (e *Exporter) deliver(ctx context.Context, flows []*flow.Flow) (left []*flow.Flow) {
	giveUp := time.Now().Add(e.timing.giveUp)
	pause := e.timing.first
	for {
		a := e.try(ctx, flows)
		if a.err == nil {
			e.count(len(flows)-a.rejected, a.rejected, LossRefused)
			e.note(partly(a))
			return nil
		}
		if ctx.Err() != nil {
			return flows
		}
		e.note(a.err)
		if !a.again {
			e.count(0, len(flows), LossRefused)
			return nil
		}
		// By chance between half of the pause and all of it: agents that failed together do not
		// come back together.
		wait := max(a.after, pause/2+rand.N(pause/2+1))
		if time.Now().Add(wait).After(giveUp) {
			e.count(0, len(flows), LossUnanswered)
			return nil
		}
		pause = min(2*pause, e.timing.most)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return flows
		}
	}
}

// partly is the error of an answer that took not all.
func partly(a answer) error {
	if a.rejected == 0 {
		return nil
	}
	return fmt.Errorf("the collector refused %d flows: %.200q", a.rejected, a.said)
}

// note tells of a change between failing and working.
func (e *Exporter) note(err error) {
	if (err != nil) != e.failing {
		e.failing = err != nil
		if e.failing {
			e.cfg.Log.Error("flows do not reach the collector", "collector", e.url, "err", err)
		} else {
			e.cfg.Log.Info("flows reach the collector again", "collector", e.url)
		}
	}
	if e.cfg.Failed != nil {
		e.cfg.Failed(err)
	}
}

// try sends flows once.
func (e *Exporter) try(ctx context.Context, flows []*flow.Flow) answer {
	body, err := encode(e.cfg, flows)
	if err != nil {
		return answer{err: err}
	}
	ctx, cancel := context.WithTimeout(ctx, e.timing.answer)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url.String(), bytes.NewReader(body))
	if err != nil {
		return answer{err: err}
	}
	req.Header = e.header.Clone()
	req.Header.Set("Content-Type", "application/x-protobuf")
	req.Header.Set("Content-Encoding", "gzip")
	if req.Header.Get("User-Agent") == "" {
		req.Header.Set("User-Agent", "heddled/"+e.cfg.Version)
	}
	resp, err := e.client.Do(req)
	if err != nil {
		return answer{err: fmt.Errorf("send flows: %w", err), again: true}
	}
	defer func() { _ = resp.Body.Close() }()
	said, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return answer{err: fmt.Errorf("read the collector's answer: %w", err), again: true}
	}
	return judge(resp, said)
}

// judge says what a response means, as OTLP/HTTP has it.
func judge(resp *http.Response, body []byte) answer {
	if resp.StatusCode/100 == 2 {
		var got collector.ExportLogsServiceResponse
		// A collector that has taken them may say it in words that are none of the protocol.
		if proto.Unmarshal(body, &got) != nil || got.PartialSuccess.GetRejectedLogRecords() <= 0 {
			return answer{}
		}
		return answer{rejected: int(min(got.PartialSuccess.RejectedLogRecords, batch)), said: got.PartialSuccess.ErrorMessage}
	}
	why := errors.New("the collector answered " + resp.Status)
	var told status.Status
	if proto.Unmarshal(body, &told) == nil && told.Message != "" {
		why = fmt.Errorf("%w: %.200q", why, told.Message)
	}
	switch resp.StatusCode {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return answer{err: why, again: true, after: retryAfter(resp.Header.Get("Retry-After"), time.Now())}
	case http.StatusUnauthorized, http.StatusForbidden:
		why = fmt.Errorf("%w: look at --otlp-headers-file and --otlp-cert", why)
	case http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusMovedPermanently, http.StatusFound, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		why = fmt.Errorf("%w: is --otlp-endpoint the URL for OTLP by HTTP, port 4318?", why)
	}
	return answer{err: why}
}

// retryAfter reads seconds or a date; 0 for what is neither.
func retryAfter(s string, now time.Time) time.Duration {
	if seconds, err := strconv.ParseUint(s, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second
	}
	if at, err := http.ParseTime(s); err == nil {
		return max(at.Sub(now), 0)
	}
	return 0
}

// encode makes the body of a request.
func encode(cfg Config, flows []*flow.Flow) ([]byte, error) {
	raw, err := proto.Marshal(request(cfg, flows))
	if err != nil {
		return nil, fmt.Errorf("encode flows: %w", err)
	}
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	_, err = z.Write(raw)
	if err := errors.Join(err, z.Close()); err != nil {
		return nil, fmt.Errorf("compress flows: %w", err)
	}
	return out.Bytes(), nil
}
