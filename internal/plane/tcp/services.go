package tcp

import (
	"context"
	"errors"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

// Services lists the services in force on this node. They are in the datapath's maps only, where an
// earlier agent's are found: whoever makes them compares, after it or the agent was away.
func (p *Plane) Services() ([]model.Service, error) { return p.datapath.Services() }

// EditServices changes them, one after the other.
func (p *Plane) EditServices(ctx context.Context, edit api.ServiceEdit) error {
	for _, addr := range edit.Delete { // first: it makes room
		if err := p.datapath.DeleteService(addr); err != nil {
			return err
		}
	}
	for _, s := range edit.Put {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := p.datapath.SetService(s)
		if errors.Is(err, datapath.ErrServicesFull) {
			return &api.Error{Code: api.CodeExhausted, Field: "put", Message: s.Addr.String() + ": " + err.Error(),
				Remedy: "a node takes 65536 services with 524288 backends"}
		}
		if err != nil {
			return err
		}
	}
	return nil
}
