/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Handshakes whose listener has closed. */
#ifndef HEDDLE_ORPHANS_H
#define HEDDLE_ORPHANS_H

#include "include/kernel.h"

/* Until when, in nanoseconds of bpf_ktime_get_ns(), a handshake may be under way whose listener has
 * closed: a client sends its last ACK after 200 ms at the latest. Written by sock_release. */
volatile __u64 orphans_until = 0;
#define ORPHANS_FOR (1000 * 1000 * 1000ULL)

#endif
