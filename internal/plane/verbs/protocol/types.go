//go:build ignore

// The types of clib/verbs/agent.h, by names of Go. make generate has cgo -godefs make abi.go of
// this file; nothing compiles it.
package protocol

// #include "agent.h"
import "C"

const (
	Version       = C.VERBS_AGENT_VERSION
	GroupsMax     = C.VERBS_AGENT_GROUPS_MAX
	MarkDSCP      = C.VERBS_AGENT_MARK_DSCP
	MarkPriority  = C.VERBS_AGENT_MARK_PRIORITY
	CardGIDs      = C.VERBS_AGENT_CARD_GIDS
	StatisticsMax = C.VERBS_AGENT_STATISTICS_MAX
	ReasonsBefore = C.VERBS_AGENT_REASONS_BEFORE

	TypeHello      = C.VERBS_AGENT_HELLO
	TypeBegin      = C.VERBS_AGENT_BEGIN
	TypeEnd        = C.VERBS_AGENT_END
	TypeEndpoint   = C.VERBS_AGENT_ENDPOINT
	TypeRemove     = C.VERBS_AGENT_REMOVE
	TypeConnect    = C.VERBS_AGENT_CONNECT
	TypeConnected  = C.VERBS_AGENT_CONNECTED
	TypeAccepted   = C.VERBS_AGENT_ACCEPTED
	TypeRefused    = C.VERBS_AGENT_REFUSED
	TypeStats      = C.VERBS_AGENT_STATS
	TypeStatistics = C.VERBS_AGENT_STATISTICS
	TypeDrain      = C.VERBS_AGENT_DRAIN
	TypeReleased   = C.VERBS_AGENT_RELEASED
	TypeGroups     = C.VERBS_AGENT_GROUPS
	TypeAnswer     = C.VERBS_AGENT_ANSWER
	TypeAskAnew    = C.VERBS_AGENT_ASK_ANEW
	TypeCard       = C.VERBS_AGENT_CARD
	TypeAsk        = C.VERBS_AGENT_ASK

	KindEndpoints = C.VERBS_AGENT_ENDPOINTS
	KindQPs       = C.VERBS_AGENT_QPS
	KindIDs       = C.VERBS_AGENT_IDS
)

type (
	Head           C.struct_verbs_agent_head
	Number         C.struct_verbs_agent_number
	Limits         C.struct_verbs_agent_limits
	Endpoint       C.struct_verbs_agent_endpoint
	Ends           C.struct_verbs_agent_ends
	Answer         C.struct_verbs_agent_answer
	Groups         C.struct_verbs_agent_groups
	Card           C.struct_verbs_agent_card
	Stats          C.struct_verbs_agent_stats
	Statistics     C.struct_verbs_agent_statistics
	Traffic        C.struct_verbs_agent_traffic
	EndpointRecord C.struct_verbs_agent_endpoint_record
	QPRecord       C.struct_verbs_agent_qp_record
	IDRecord       C.struct_verbs_agent_id_record
)
