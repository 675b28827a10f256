package runtime

import (
	"slices"

	"heddle.dev/heddle/internal/model"
)

// Where the library for connections through memory is, and where containers have it.
const (
	guestFile        = "libheddle-guest.so"
	guestInContainer = "/dev/heddle-guest.so"
)

// guest has the bytes of a container's connections go through memory, where its stack profile says
// so (package plane/lanes). io_uring goes past the library, which follows each descriptor: it is
// refused (addGuestTraps).
var guest = injection{
	annotation: model.AnnotationGuest, intercepted: true,
	libraries: []library{{file: guestFile, at: guestInContainer}},
}

// noIOUring refuses what programs take for a kernel without io_uring.
var noIOUring = trap{syscall: "io_uring_setup", calls: []callSet{anyCall()}, answer: object{"action": actErrno, "errnoRet": number(eNoSys)}}

// addGuestTraps adds to what is trapped in a container what the library needs, if the container
// asks for it.
func addGuestTraps(config object, calls []trap) ([]trap, error) {
	annotations, err := readObject(config, "annotations", "annotations")
	if err != nil {
		return nil, err
	}
	wanted, err := isTrue(annotations, model.AnnotationGuest)
	if err != nil || !wanted {
		return calls, err
	}
	return append(slices.Clone(calls), noIOUring), nil
}
