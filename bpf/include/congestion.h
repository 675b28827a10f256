/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Names of congestion controls as words: a constant struct, a string among them, is not to be
 * copied (TestNoConstantStructs). */
#ifndef HEDDLE_CONGESTION_H
#define HEDDLE_CONGESTION_H

#include "include/kernel.h"

#define CONGESTION_NAME 16         /* TCP_CA_NAME_MAX */
#define CONGESTION_BBR  0x00726262 /* "bbr" with its end, as a little-endian word */
#define CONGESTION_RENO 0x6f6e6572 /* "reno" */

/* The name as words. */
struct congestion {
	__u32 word[CONGESTION_NAME / 4];
};

static __always_inline void congestion_from(struct congestion *c, __u32 first)
{
	c->word[0] = first;
	c->word[1] = 0;
	c->word[2] = 0;
	c->word[3] = 0;
}

#endif
