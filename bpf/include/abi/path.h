/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* How a connection travels. */
#ifndef HEDDLE_ABI_PATH_H
#define HEDDLE_ABI_PATH_H

#include <linux/types.h>

/* How a connection travels; internal/plane/tcp/names.Paths has the meanings. */
enum heddle_path {
	PATH_NONE,
	PATH_DIRECT,
	PATH_LOCAL,
	PATH_LOOPBACK,
	PATH_OVERLAY,
	PATH_NODE,
	PATH_OUTSIDE,
	PATH_LISTEN,
};

#endif
