package stack

import (
	"crypto/sha256"
	"encoding/hex"
)

// MaxObject is how many bytes a congestion control's object may have: with the third that base64
// adds it fits a value of the store.
const MaxObject = 512 << 10

// Object is a congestion control of the operator's own: a BPF object with a struct_ops of type
// tcp_congestion_ops.
type Object struct {
	// Name is what sockets and profiles call it.
	Name string `json:"name"`
	// SHA256 is that of Object, in hexadecimal.
	SHA256 string `json:"sha256"`
	// Object is an ELF file.
	Object []byte `json:"object"`
}

// Sum gives the SHA-256 of an object in hexadecimal.
func Sum(object []byte) string {
	sum := sha256.Sum256(object)
	return hex.EncodeToString(sum[:])
}

// Validate reports what is wrong with an object by itself, a *policy.FieldError; whether a kernel
// takes it is not known here.
func (o *Object) Validate() error {
	if err := ValidateCongestion(o.Name); err != nil {
		return err
	}
	if len(o.Object) == 0 || len(o.Object) > MaxObject {
		return fault("object", "strip it with llvm-strip -g", "%d bytes: want 1 to %d", len(o.Object), MaxObject)
	}
	if sum := Sum(o.Object); o.SHA256 != sum {
		return fault("sha256", "store it again", "%.64q: the object has %s", o.SHA256, sum)
	}
	return nil
}
