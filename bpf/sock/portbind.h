/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Port conflicts between addresses of one container that the kernel cannot see. Underneath, 0.0.0.0
 * and the own address are one node address, 127.0.0.1 and ::1 are others, so the kernel finds
 * 0.0.0.0:80 against 10.244.1.2:80 but not against 127.0.0.1:80. Here each bound socket reserves
 * its port for the kind of address it asked for, and a socket whose kind overlaps with a
 * reservation that is there is refused as inet_csk_bind_conflict() would. */
#ifndef HEDDLE_SOCK_PORTBIND_H
#define HEDDLE_SOCK_PORTBIND_H

#include "include/abi/portbind.h"
#include "include/maps.h"

/* Which kinds overlap with kind, apart from itself: those are at one node address. */
static __always_inline __u32 overlapping(__u32 kind)
{
	switch (kind) {
	case PORTBIND_ANY4:
		return 1 << PORTBIND_LOOPBACK4;
	case PORTBIND_ANY:
		return 1 << PORTBIND_LOOPBACK4 | 1 << PORTBIND_ANY6 | 1 << PORTBIND_LOOPBACK6 |
		       1 << PORTBIND_OWN6;
	case PORTBIND_LOOPBACK4:
		return 1 << PORTBIND_ANY4 | 1 << PORTBIND_ANY;
	case PORTBIND_ANY6:
		return 1 << PORTBIND_ANY | 1 << PORTBIND_LOOPBACK6;
	case PORTBIND_OWN6:
		return 1 << PORTBIND_ANY;
	case PORTBIND_LOOPBACK6:
		return 1 << PORTBIND_ANY | 1 << PORTBIND_ANY6;
	}
	return 0;
}

static __always_inline struct port_key portbind_key(const struct sock_tag *tag)
{
	struct port_key k = {};

	k.endpoint_id = tag->endpoint_id;
	k.port = tag->claim_port;
	return k;
}

/* Adds n (1 or -1) to what the reservation of tag's socket counts for. */
static __always_inline void count_portbind(struct portbinds *c, const struct sock_tag *tag, __s32 n)
{
	__u32 kind = tag->claim & (PORTBIND_KINDS - 1);

	__sync_fetch_and_add(&c->by_kind[kind].sockets, n);
	if (!(tag->claim_flags & PORTBIND_REUSEADDR) || tag->claim_flags & PORTBIND_LISTENS)
		__sync_fetch_and_add(&c->by_kind[kind].exclusive, n);
	if (!(tag->claim_flags & PORTBIND_REUSEPORT))
		__sync_fetch_and_add(&c->by_kind[kind].alone, n);
}

static __always_inline bool no_portbinds(const struct portbinds *c)
{
	__u32 i;

	/* Fewer than none are left where sockets came and went at the same moment: see
	 * release_portbind. */
	for (i = 0; i < PORTBIND_KINDS; i++)
		if ((__s32)c->by_kind[i].sockets > 0)
			return false;
	return true;
}

/* Gives up the reservation of tag's socket, if it has one. Two sockets that come and go at the same
 * moment can lose one, and with it no more than the refusal of a later one. */
static __always_inline void release_portbind(struct sock_tag *tag)
{
	struct port_key k = portbind_key(tag);
	struct portbinds *c;

	if (tag->claim == PORTBIND_NONE)
		return;
	c = bpf_map_lookup_elem(&claims_by_port, &k);
	if (c) {
		count_portbind(c, tag, -1);
		if (no_portbinds(c))
			bpf_map_delete_elem(&claims_by_port, &k);
	}
	tag->claim = PORTBIND_NONE;
}

/* Whether a reservation of another kind forbids that of tag's socket. */
static __always_inline bool conflicts(const struct portbinds *c, const struct sock_tag *tag)
{
	__u32 kinds = overlapping(tag->claim), i;

	for (i = 0; i < PORTBIND_KINDS; i++) {
		if (!(kinds & 1 << i) || (__s32)c->by_kind[i].sockets <= 0)
			continue;
		if (tag->claim_flags & PORTBIND_REUSEADDR && (__s32)c->by_kind[i].exclusive <= 0)
			continue;
		if (tag->claim_flags & PORTBIND_REUSEPORT && (__s32)c->by_kind[i].alone <= 0 &&
		    c->uid == tag->claim_uid)
			continue;
		return true;
	}
	return false;
}

/* What bind() asks for is noted before the kernel decides; post_bind makes it a reservation. */
static __always_inline void request_portbind(struct sock_tag *tag, __u32 kind, bool any_port)
{
	if (tag->claim != PORTBIND_NONE)
		return; /* bound already: the kernel will refuse */
	tag->claim_wish = kind;
	tag->claim_flags &= ~(PORTBIND_PORT_ZERO | PORTBIND_LISTENS);
	if (any_port)
		tag->claim_flags |= PORTBIND_PORT_ZERO;
}

/* Reserves what was asked for. NULL: the socket has a reservation, or asks for none, or the map is
 * full: then there is no refusal. */
static __always_inline struct portbinds *make_portbind(struct sock_tag *tag, __u32 port, __u32 uid)
{
	struct portbinds none = {}, *c;
	struct port_key k;

	if (tag->claim != PORTBIND_NONE || tag->claim_wish == PORTBIND_NONE)
		return NULL;
	tag->claim_port = (__u16)port;
	k = portbind_key(tag);
	c = bpf_map_lookup_elem(&claims_by_port, &k);
	if (!c) {
		bpf_map_update_elem(&claims_by_port, &k, &none, BPF_NOEXIST);
		c = bpf_map_lookup_elem(&claims_by_port, &k);
	}
	if (!c)
		return NULL;
	tag->claim = tag->claim_wish;
	tag->claim_wish = PORTBIND_NONE;
	tag->claim_uid = uid;
	count_portbind(c, tag, 1);
	return c;
}

static __always_inline int portbind(struct sock_tag *tag, __u32 port)
{
	struct portbinds *c = make_portbind(tag, port, (__u32)bpf_get_current_uid_gid());

	if (!c)
		return 1;
	/* A port of the kernel's choice may fall on a reservation: the program must not be refused
	 * for that. */
	if (!(tag->claim_flags & PORTBIND_PORT_ZERO) && conflicts(c, tag)) {
		release_portbind(tag);
		bpf_set_retval(-EADDRINUSE_);
		return 0;
	}
	c->uid = tag->claim_uid;
	return 1;
}

/* One of enum portbind_flags of the socket changes to on. */
static __always_inline void set_portbind_flag(struct sock_tag *tag, __u8 flag, bool on)
{
	struct port_key k = portbind_key(tag);
	struct portbinds *c = NULL;

	if (tag->claim != PORTBIND_NONE)
		c = bpf_map_lookup_elem(&claims_by_port, &k);
	if (c)
		count_portbind(c, tag, -1);
	if (on)
		tag->claim_flags |= flag;
	else
		tag->claim_flags &= ~flag;
	if (c)
		count_portbind(c, tag, 1);
}

#endif
