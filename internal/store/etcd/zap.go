package etcd

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc/grpclog"
)

// zapTo gives a logger for etcd that passes errors on to log, until muted is set, and drops the
// rest.
func zapTo(log *slog.Logger, muted *atomic.Bool, opts ...zap.Option) *zap.Logger {
	return zap.New(&slogCore{log: log, muted: muted}, opts...)
}

// fatalHook is what etcd's logger does when etcd logs that it cannot go on, as with damaged data.
// It would end the process. While the server starts, this ends only etcd's goroutine and passes the
// message on, so that starting fails with an error. Later nothing better is left than to panic: who
// goes on with etcd half dead may lose what others believe to be stored.
type fatalHook struct {
	started atomic.Bool
	said    chan error // room for one
}

// options makes a logger call OnWrite.
func (w *fatalHook) options() []zap.Option {
	return []zap.Option{zap.WithPanicHook(w), zap.WithFatalHook(w)}
}

// OnWrite implements zapcore.CheckWriteHook.
func (w *fatalHook) OnWrite(e *zapcore.CheckedEntry, fields []zapcore.Field) {
	if w.started.Load() {
		panic("etcd: " + e.Message)
	}
	err := errors.New(e.Message)
	for _, f := range fields {
		if cause, ok := f.Interface.(error); ok {
			err = fmt.Errorf("%s: %w", e.Message, cause)
		}
	}
	select {
	case w.said <- err:
	default: // the first is the cause
	}
	runtime.Goexit()
}

// quietGRPC makes gRPC report errors only. etcd sets gRPC's logger, once in a process, when it
// first gets its own; so this has it do that, and then replaces the logger for good.
var quietGRPC = sync.OnceValue(func() error {
	if err := embed.NewZapLoggerBuilder(zap.NewNop())(embed.NewConfig()); err != nil {
		return err
	}
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, slog.NewLogLogger(slog.Default().Handler(), slog.LevelError).Writer()))
	return nil
})

// harmless is an error that etcd may report once in a new directory, when it looks at its data
// before there is any. It tries again.
const harmless = "failed to update storage version"

// slogCore is a zapcore.Core that writes to an slog.Logger. Its fields do not change.
type slogCore struct {
	log    *slog.Logger
	muted  *atomic.Bool // set when a server is told to stop, because etcd reports as errors what follows
	fields []zapcore.Field
}

// Enabled lets errors through.
func (c *slogCore) Enabled(l zapcore.Level) bool {
	return l >= zapcore.ErrorLevel && !c.muted.Load()
}

// With gives a core that adds fields to every entry.
func (c *slogCore) With(fields []zapcore.Field) zapcore.Core {
	return &slogCore{log: c.log, muted: c.muted, fields: append(c.fields[:len(c.fields):len(c.fields)], fields...)}
}

// Check adds this core to the entry if it lets it through.
func (c *slogCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) && e.Message != harmless {
		return ce.AddCore(e, c)
	}
	return ce
}

// Write passes one entry on.
func (c *slogCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	m := zapcore.NewMapObjectEncoder()
	for _, f := range c.fields {
		f.AddTo(m)
	}
	for _, f := range fields {
		f.AddTo(m)
	}
	args := make([]any, 0, 2*len(m.Fields))
	for k, v := range m.Fields {
		args = append(args, k, v)
	}
	c.log.Error("etcd: "+e.Message, args...)
	return nil
}

// Sync does nothing: slog does not buffer.
func (c *slogCore) Sync() error { return nil }
