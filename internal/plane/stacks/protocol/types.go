//go:build ignore

// The types of clib/stack/protocol.h, by names of Go. make generate has cgo -godefs make abi.go of
// this file; nothing compiles it.
package protocol

// #include "protocol.h"
import "C"

const (
	Version           = C.STACK_VERSION
	MessageMax        = C.STACK_MESSAGE_MAX
	DescriptorsMax    = C.STACK_DESCRIPTORS_MAX
	Answer            = C.STACK_ANSWER
	IDOfModule        = C.STACK_ID_OF_MODULE
	FirstOwnPort      = C.STACK_FIRST_OWN_PORT
	ReuseAddress      = C.STACK_REUSE_ADDRESS
	ReusePort         = C.STACK_REUSE_PORT
	V6Only            = C.STACK_V6_ONLY
	Abort             = C.STACK_ABORT
	SetCongestion     = C.STACK_SET_CONGESTION
	SetNoDelay        = C.STACK_SET_NO_DELAY
	SetKeepalive      = C.STACK_SET_KEEPALIVE
	SetKeepaliveIdle  = C.STACK_SET_KEEPALIVE_IDLE
	SetKeepaliveIntv  = C.STACK_SET_KEEPALIVE_INTV
	SetKeepaliveCnt   = C.STACK_SET_KEEPALIVE_CNT
	SetUserTimeout    = C.STACK_SET_USER_TIMEOUT
	SetLinger         = C.STACK_SET_LINGER
	SetAckDelay       = C.STACK_SET_ACK_DELAY
	SetSendBuffer     = C.STACK_SET_SEND_BUFFER
	SetReceiveBuffer  = C.STACK_SET_RECEIVE_BUFFER
	SetHopLimit       = C.STACK_SET_HOP_LIMIT
	SetAll            = C.STACK_SET_ALL
	LingerOff         = C.STACK_LINGER_OFF
	CanReno           = C.STACK_CAN_RENO
	CanCubic          = C.STACK_CAN_CUBIC
	CanBBR            = C.STACK_CAN_BBR
	CanSACK           = C.STACK_CAN_SACK
	CanIPv6           = C.STACK_CAN_IPV6
	CanTellSent       = C.STACK_CAN_TELL_SENT
	TypeHello         = C.STACK_HELLO
	TypeBegin         = C.STACK_BEGIN
	TypeEnd           = C.STACK_END
	TypeTenant        = C.STACK_TENANT
	TypeTenantGone    = C.STACK_TENANT_GONE
	TypeBind          = C.STACK_BIND
	TypeListen        = C.STACK_LISTEN
	TypeConnect       = C.STACK_CONNECT
	TypeTaken         = C.STACK_TAKEN
	TypeSet           = C.STACK_SET
	TypeInfo          = C.STACK_INFO
	TypeClose         = C.STACK_CLOSE
	TypeStats         = C.STACK_STATS
	TypeList          = C.STACK_LIST
	TypeTellSent      = C.STACK_TELL_SENT
	TypeAccepted      = C.STACK_ACCEPTED
	TypeEnded         = C.STACK_ENDED
	TypeListed        = C.STACK_LISTED
	TypeSent          = C.STACK_SENT
	LinkIP            = C.STACK_LINK_IP
	LinkEthernet      = C.STACK_LINK_ETHERNET
	CongestionDefault = C.STACK_CONGESTION_DEFAULT
	CongestionNone    = C.STACK_CONGESTION_NONE
	CongestionReno    = C.STACK_CONGESTION_RENO
	CongestionCubic   = C.STACK_CONGESTION_CUBIC
	CongestionBBR     = C.STACK_CONGESTION_BBR
	KindBound         = C.STACK_KIND_BOUND
	KindListener      = C.STACK_KIND_LISTENER
	KindConnection    = C.STACK_KIND_CONNECTION
)

type (
	Head     C.struct_stack_head
	Plain    C.struct_stack_plain
	Address  C.struct_stack_address
	Hello    C.struct_stack_hello
	Options  C.struct_stack_options
	Limits   C.struct_stack_limits
	Tenant   C.struct_stack_tenant
	Bind     C.struct_stack_bind
	Listen   C.struct_stack_listen
	Connect  C.struct_stack_connect
	Named    C.struct_stack_named
	Set      C.struct_stack_set
	Close    C.struct_stack_close
	Accepted C.struct_stack_accepted
	Info     C.struct_stack_info
	Stats    C.struct_stack_stats
)
