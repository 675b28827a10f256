package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"path"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"heddle.dev/heddle/internal/model"
)

// Limits of what a request may carry.
const (
	// MaxRequestBytes bounds a request's body.
	MaxRequestBytes = 1 << 20
	// MaxLabels bounds the number of an endpoint's labels.
	MaxLabels = 64
	// MaxLabelKey and MaxLabelValue bound a label, in bytes.
	MaxLabelKey   = 317
	MaxLabelValue = 256
	// MaxLabelsBytes bounds all labels of an endpoint together, as JSON, where some characters take
	// six bytes: the store takes 64 KiB for the whole endpoint.
	MaxLabelsBytes = 48 << 10
	// maxPath is PATH_MAX without the terminating NUL.
	maxPath = 4095
)

// ValidateEndpointName checks an endpoint's name: see model.ValidateEndpointName. The error is an
// *Error for field.
func ValidateEndpointName(field, name string) error {
	if err := model.ValidateEndpointName(name); err != nil {
		return &Error{Code: CodeInvalid, Field: field, Message: err.Error()}
	}
	return nil
}

// Validate checks the request's form. Whether the namespace exists and the address is free is for
// the agent to say. The error is an *Error that names the field.
func (r EndpointRequest) Validate() error {
	if err := ValidateEndpointName("name", r.Name); err != nil {
		return err
	}
	switch p := r.NetnsPath; {
	case p == "":
		return &Error{Code: CodeInvalid, Field: "netns_path", Message: "is missing",
			Remedy: "give the path of the container's network namespace, such as /proc/PID/ns/net"}
	case !path.IsAbs(p) || path.Clean(p) != p || len(p) > maxPath || strings.ContainsRune(p, 0):
		return &Error{Code: CodeInvalid, Field: "netns_path", Message: fmt.Sprintf("%.100q is no clean absolute path", p),
			Remedy: "give an absolute path without '.', '..' and double slashes"}
	}
	if a := r.Addr; a.IsValid() && (a.Is4In6() || a.Zone() != "" || a.IsUnspecified() || a.IsMulticast() || a.IsLoopback()) {
		return &Error{Code: CodeInvalid, Field: "addr", Message: fmt.Sprintf("%s cannot be a container's address", a),
			Remedy: "give a free address of one of the node's prefixes, or none"}
	}
	if err := model.ValidateDevice(r.Device); err != nil {
		return &Error{Code: CodeInvalid, Field: "device", Message: err.Error(), Remedy: "give a name such as eth0, or none"}
	}
	if err := ValidateVerbs(r.Verbs, r.Intercepted); err != nil {
		return err
	}
	if r.Adopted != nil {
		if err := r.Adopted.Validate(); err != nil {
			return &Error{Code: CodeInvalid, Field: "carried", Message: err.Error()}
		}
		if !r.Addr.Is4() {
			return &Error{Code: CodeInvalid, Field: "addr", Message: "is missing or not IPv4",
				Remedy: "with carried, give the IPv4 address that the container has"}
		}
	}
	if r.CNI != nil {
		if err := r.CNI.Validate(); err != nil {
			return &Error{Code: CodeInvalid, Field: "cni", Message: err.Error()}
		}
	}
	if err := validatePorts(r.Ports); err != nil {
		return err
	}
	if err := validateLimits("limits.", r.Limits); err != nil {
		return err
	}
	return r.validateLabels()
}

// validateLabels lets nothing pass that the store refuses, so that the answer names the field.
func (r EndpointRequest) validateLabels() error {
	refuse := func(message, remedy string) error {
		return &Error{Code: CodeInvalid, Field: "labels", Message: message, Remedy: remedy}
	}
	if len(r.Labels) > MaxLabels {
		return refuse(fmt.Sprintf("%d labels, at most %d are taken", len(r.Labels), MaxLabels), "leave out those that no policy needs")
	}
	for k, v := range r.Labels {
		if k == "" || len(k) > MaxLabelKey || !printable(k) {
			return refuse(fmt.Sprintf("key %.80q of %d bytes: want 1 to %d bytes of printable text", k, len(k), MaxLabelKey), "give a shorter key, without control characters")
		}
		if len(v) > MaxLabelValue || !printable(v) {
			return refuse(fmt.Sprintf("value of %.80q, %d bytes: want at most %d bytes of printable text", k, len(v), MaxLabelValue),
				"give a shorter value, without control characters")
		}
	}
	raw, err := json.Marshal(r.Labels)
	if err != nil || len(raw) > MaxLabelsBytes {
		return refuse(fmt.Sprintf("%d bytes as JSON, at most %d are taken", len(raw), MaxLabelsBytes), "give fewer or shorter labels")
	}
	return nil
}

// printable reports whether s may stand in a table or a log line. U+FFFD is what the JSON decoder
// makes of bytes that are not UTF-8.
func printable(s string) bool {
	for _, c := range s {
		if c == utf8.RuneError || !unicode.IsPrint(c) {
			return false
		}
	}
	return true
}

// endpointBody is EndpointRequest with the address as text, so that a malformed one is reported
// with its field.
type endpointBody struct {
	Name        string `json:"name"`
	NetnsPath   string `json:"netns_path"`
	Intercepted bool   `json:"intercepted"`

	Verbs model.VerbsEndpoint `json:"verbs"`

	Addr   string            `json:"addr"`
	Labels map[string]string `json:"labels"`

	Device string               `json:"device"`
	CNI    *model.CNIAttachment `json:"cni"`

	Adopted *model.Adopted `json:"carried"`

	Ports []model.PortRequest `json:"ports"`

	Limits model.Limits `json:"limits"`
}

// decodeEndpointRequest reads and checks the body of POST /v1/endpoints.
func decodeEndpointRequest(body io.Reader) (EndpointRequest, error) {
	var b endpointBody
	if err := decodeStrict(body, MaxRequestBytes, &b); err != nil {
		return EndpointRequest{}, err
	}
	req := EndpointRequest{Name: b.Name, NetnsPath: b.NetnsPath, Intercepted: b.Intercepted, Verbs: b.Verbs, Labels: b.Labels, Device: b.Device, CNI: b.CNI, Adopted: b.Adopted, Ports: b.Ports, Limits: b.Limits}
	if b.Addr != "" {
		addr, err := netip.ParseAddr(b.Addr)
		if err != nil {
			return EndpointRequest{}, &Error{Code: CodeInvalid, Field: "addr",
				Message: fmt.Sprintf("%.60q is no IP address", b.Addr), Remedy: "write it as 10.0.0.7, or leave it out"}
		}
		req.Addr = addr
	}
	if err := req.Validate(); err != nil {
		return EndpointRequest{}, err
	}
	return req, nil
}

// decodeStrict reads exactly one JSON object into v: unknown fields, more than most bytes, and
// anything but white space behind the object are refused. The error is an *Error.
func decodeStrict(body io.Reader, most int64, v any) error {
	// One byte beyond the limit tells "too large" from "cut off".
	limited := &io.LimitedReader{R: body, N: most + 1}
	dec := json.NewDecoder(limited)
	dec.DisallowUnknownFields()
	var raw json.RawMessage
	err := dec.Decode(&raw)
	if err == nil {
		_, err = dec.Token()
		if err == nil {
			err = errors.New("data after the JSON object")
		} else if errors.Is(err, io.EOF) {
			err = nil
		}
	}
	if limited.N <= 0 {
		return &Error{Code: CodeTooLarge, Message: fmt.Sprintf("request body exceeds %d bytes", most)}
	}
	switch {
	case errors.Is(err, io.EOF):
		return &Error{Code: CodeInvalid, Message: "request body is empty", Remedy: "send a JSON object"}
	case err != nil:
		return &Error{Code: CodeInvalid, Message: "malformed JSON: " + err.Error()}
	case raw[0] != '{':
		return &Error{Code: CodeInvalid, Message: "request body is no JSON object", Remedy: "send a JSON object"}
	}
	return decodeObject(raw, v)
}

// decodeObject fills v from raw, which is well-formed JSON, and turns the decoder's errors into
// *Errors that name the field.
func decodeObject(raw json.RawMessage, v any) error {
	dec := json.NewDecoder(strings.NewReader(string(raw)))
	dec.DisallowUnknownFields()
	err := dec.Decode(v)
	if err == nil {
		return nil
	}
	var mismatch *json.UnmarshalTypeError
	if errors.As(err, &mismatch) {
		return &Error{Code: CodeInvalid, Field: mismatch.Field,
			Message: fmt.Sprintf("is a %s, want a %s", mismatch.Value, mismatch.Type)}
	}
	// encoding/json has no type for this one.
	if field, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		if name, uerr := strconv.Unquote(field); uerr == nil {
			field = name
		}
		return &Error{Code: CodeInvalid, Field: field, Message: "unknown field"}
	}
	return &Error{Code: CodeInvalid, Message: "malformed request: " + err.Error()}
}

// decodeConnectionFilter reads the query of GET /v1/connections.
func decodeConnectionFilter(query string) (ConnectionFilter, error) {
	var f ConnectionFilter
	values, err := url.ParseQuery(query)
	if err != nil {
		return f, &Error{Code: CodeInvalid, Message: "malformed query: " + err.Error()}
	}
	for key, vs := range values {
		if len(vs) != 1 {
			return ConnectionFilter{}, &Error{Code: CodeInvalid, Field: key, Message: "given more than once"}
		}
		switch key {
		case "endpoint":
			if err := ValidateEndpointName(key, vs[0]); err != nil {
				return ConnectionFilter{}, err
			}
			f.Endpoint = vs[0]
		case "listeners":
			if f.Listeners, err = strconv.ParseBool(vs[0]); err != nil {
				return ConnectionFilter{}, &Error{Code: CodeInvalid, Field: key,
					Message: fmt.Sprintf("%.40q is no truth value", vs[0]), Remedy: "use true or false"}
			}
		default:
			return ConnectionFilter{}, &Error{Code: CodeInvalid, Field: key, Message: "unknown query parameter",
				Remedy: "use endpoint and listeners"}
		}
	}
	return f, nil
}

// noQuery refuses a query where none is known, so that a misspelt filter is not taken for "all".
func noQuery(r *http.Request) error {
	if r.URL.RawQuery != "" {
		return &Error{Code: CodeInvalid, Message: fmt.Sprintf("unknown query %.80q", r.URL.RawQuery)}
	}
	return nil
}
