/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The SYN option as on the wire. */
#ifndef HEDDLE_ABI_SYN_OPTION_H
#define HEDDLE_ABI_SYN_OPTION_H

#include <linux/types.h>

/* The SYN option of docs/protocols/syn-option.md, as on the wire. */
struct syn_option {
	__u8 kind;
	__u8 length;
	__be16 exid;
	__be16 version_network; /* version in the upper 4 bits, network id in the lower 12 */
	__be16 dst_port;
	__be32 dst;
	__be32 src;
};

#endif
