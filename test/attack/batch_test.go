package attack

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"ask by hand for sockets by the batch, for more batches than one may have, and for files of who made them", model.ProtectBatches, "n1", askBatches},
	)
}

var batchTries int

// askBatches has a container that may have batches, and CAP_SYS_PTRACE, take as many as it gets and
// look where they lead, and then, when the agent makes batches for sure, one that may have none ask
// for them.
func askBatches(t *testing.T) string {
	const may, most = 64, 80
	wait := strconv.Itoa(int(testutil.WaitTimeout / time.Second))
	batchTries++ // a container for each
	found := results(t, lab.RunContainer(t, "heddle", fmt.Sprintf("n1/batches%d", batchTries), func(spec *specs.Spec) {
		spec.Annotations[model.AnnotationSocketPool] = "true"
		c := spec.Process.Capabilities
		for _, set := range []*[]string{&c.Bounding, &c.Effective, &c.Permitted} {
			*set = append(*set, "CAP_SYS_PTRACE")
		}
	}, hostile(t), "batches", wait, strconv.Itoa(most)))
	uninvited := runHostile(t, "batches", "0", "1")
	var won []string
	for _, try := range [][4]string{
		{"batches of one container", found["batches"], strconv.Itoa(may), strconv.Itoa(most)},
		{"file of who made a batch", found["file of who made it"], "nobody", "ok"},
		{"batches of a container that may have none", uninvited["batches"], "0", "1"},
	} {
		if g := gained(t, try[0], try[1], try[2], try[3]); g != "" {
			won = append(won, g)
		}
	}
	if len(won) > 0 && len(won) < 3 {
		t.Errorf("only some succeed: %v", won)
	}
	return strings.Join(won, "; ")
}
