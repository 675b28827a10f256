package runtime

import (
	"testing"

	"heddle.dev/heddle/internal/model"
)

// TestGuestTraps: containers that preload the guest library have no io_uring, which would go past
// it; others keep theirs.
func TestGuestTraps(t *testing.T) {
	for value, want := range map[any]bool{"true": true, "false": false, nil: false} {
		config := object{"annotations": object{model.AnnotationGuest: value}}
		got, err := addGuestTraps(config, traps)
		if err != nil || (len(got) == len(traps)+1) != want {
			t.Errorf("annotation %v: %d calls, %v", value, len(got), err)
		}
		if last := got[len(got)-1]; want && (last.syscall != "io_uring_setup" || last.answer["action"] != actErrno) {
			t.Errorf("%+v", last)
		}
	}
	if _, err := addGuestTraps(object{"annotations": object{model.AnnotationGuest: "maybe"}}, traps); err == nil {
		t.Error("an annotation of neither is taken")
	}
}
