/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* close() of the last descriptor: a socket gives back what it had. */

#include "include/abi/path.h"
#include "include/orphans.h"
#include "include/tag.h"
#include "sock/portbind.h"
#include "sock/reserved_ports.h"
#include "sock/socket_quota.h"

SEC("cgroup/sock_release")
int sock_release(struct bpf_sock *sk)
{
	struct sock_tag *tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);

	if (tag) {
		release_portbind(tag);
		uncount_socket(tag);
		port_released(sk, tag);
		if (tag->path == PATH_LISTEN)
			orphans_until = bpf_ktime_get_ns() + ORPHANS_FOR;
	}
	return 1;
}
