/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Protections that an agent of the attack suite can do without. In product builds nothing sets
 * config_without, so that the verifier sees a constant and leaves out the other branch. */
#ifndef HEDDLE_PROTECTION_H
#define HEDDLE_PROTECTION_H

#include "include/abi/protection.h"
#include "include/kernel.h"

/* Bit i for protection i of enum heddle_protection. In a section of its own, so that agents of the
 * attack suite, and no others, can leave it writable. */
const volatile __u64 config_without SEC(".rodata.without") = 0;

/* Whether protection p is in force. */
static __always_inline bool protects(enum heddle_protection p)
{
	return !(config_without >> p & 1);
}

#endif
