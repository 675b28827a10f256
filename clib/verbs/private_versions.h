/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The names that releases of rdma-core have for the version of what only its own programs and
 * drivers call. A second @ makes it the default: 34 is that of Debian 12. */
#ifndef HEDDLE_VERBS_PRIVATE_VERSIONS_H
#define HEDDLE_VERBS_PRIVATE_VERSIONS_H

#define NODE_driver_22 "IBVERBS_PRIVATE_22"
#define NODE_driver_25 "IBVERBS_PRIVATE_25"
#define NODE_driver_33 "IBVERBS_PRIVATE_33"
#define NODE_driver_34 "@IBVERBS_PRIVATE_34"
#define NODE_driver_57 "IBVERBS_PRIVATE_57"
#define NODE_driver_59 "IBVERBS_PRIVATE_59"
#define NODE_driver_64 "IBVERBS_PRIVATE_64"
#define NODE_driver_65 "IBVERBS_PRIVATE_65"

#define FOR_EACH_PRIVATE_VERSION(X)                                                                          \
	X(driver_22)                                                                                         \
	X(driver_25) X(driver_33) X(driver_34) X(driver_57) X(driver_59) X(driver_64) X(driver_65)

#endif
