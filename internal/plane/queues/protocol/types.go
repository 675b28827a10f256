//go:build ignore

// The types of clib/stack/queues.h that an agent has use for, by names of Go. make generate has cgo
// -godefs make abi.go of this file; nothing compiles it.
package protocol

// #define QUEUES_LAYOUT_ONLY
// #include "queues.h"
import "C"

const (
	Version        = C.QUEUES_VERSION
	Owners         = C.QUEUES_OWNERS
	MessageMax     = C.QUEUES_MESSAGE_MAX
	Answer         = C.QUEUES_ANSWER
	Control        = C.QUEUES_CONTROL
	Polled         = C.QUEUES_POLLED
	EndedDied      = C.QUEUES_ENDED_DIED
	StreamUsed     = C.QUEUES_STREAM_USED
	StreamDead     = C.QUEUES_STREAM_DEAD
	TypeHello      = C.QUEUES_HELLO
	TypeRegion     = C.QUEUES_REGION
	TypeRegionGone = C.QUEUES_REGION_GONE
	TypeGive       = C.QUEUES_GIVE
	TypeStop       = C.QUEUES_STOP
	TypeStats      = C.QUEUES_STATS
	TypeMake       = C.QUEUES_MAKE
	TypeGone       = C.QUEUES_GONE
)

type Head C.struct_queues_head

type Plain C.struct_queues_plain

type Region C.struct_queues_region

type Give C.struct_queues_give

type Make C.struct_queues_make

type Stats C.struct_queues_stats

type Header C.struct_queues_header

type Stream C.struct_queues_stream
