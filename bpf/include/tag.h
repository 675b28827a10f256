/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The map that both objects, heddle.bpf.c and lsm.bpf.c, have in common. */
#ifndef HEDDLE_TAG_H
#define HEDDLE_TAG_H

#include "include/abi/tag.h"
#include "include/kernel.h"

/* Tags of sockets. Written by the agent at creation and by the programs of heddle.bpf.c after; read
 * by all. Bounded by the sockets themselves; freed with them. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	__type(key, int);
	__type(value, struct sock_tag);
} tag_by_sock SEC(".maps");

#endif
