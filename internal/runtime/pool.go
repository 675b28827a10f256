package runtime

import "heddle.dev/heddle/internal/model"

// Where the library for pools of sockets is, and where containers have it.
const (
	poolFile        = "libheddle-pool.so"
	poolInContainer = "/dev/heddle-pool.so"
)

// socketPool has a container's programs fetch TCP sockets many at a time (decision 0038).
var socketPool = injection{
	annotation: model.AnnotationSocketPool, intercepted: true,
	libraries: []library{{file: poolFile, at: poolInContainer}},
}
