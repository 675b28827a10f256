package trap

import "heddle.dev/heddle/internal/testutil"

// eventually waits for what another goroutine or process brings about.
var eventually = testutil.EventuallyTrue
