/* Sends a frame that the kernel is to write a checksum into, at a place of the program's choice:
 * "xdp DEVICE START OFFSET FRAME", the frame in hexadecimal. An AF_XDP socket takes CAP_NET_RAW
 * only, and the kernel checks less of what it is told here than by PACKET_VNET_HDR: START may be in
 * any header. Prints "sent". */
#include <errno.h>
#include <linux/if_xdp.h>
#include <net/if.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>

#define SLOTS 64
#define CHUNK 4096

/* Of Linux 6.8 and 6.11, which this machine's headers may be older than. */
#define UMEM_TX_METADATA_LEN (1 << 2)
#define TX_METADATA          (1 << 1)
#define TXMD_FLAGS_CHECKSUM  (1 << 1)

struct registration {
	uint64_t addr, len;
	uint32_t chunk_size, headroom, flags, tx_metadata_len;
};

struct metadata {
	uint64_t flags;
	uint16_t csum_start, csum_offset;
	uint32_t pad;
	uint64_t launch_time;
};

static void check(long answer, const char *what)
{
	if (answer < 0) {
		perror(what);
		exit(1);
	}
}

static void ring(int s, int option)
{
	int slots = SLOTS;

	check(setsockopt(s, SOL_XDP, option, &slots, sizeof(slots)), "ring");
}

/* Puts the frame and what is said of it into the area that the kernel sends from. */
static struct xdp_desc fill(char *area, const char *hex, int start, int offset)
{
	struct xdp_desc desc = {.addr = 1024, .options = TX_METADATA};
	struct metadata m = {.flags = TXMD_FLAGS_CHECKSUM, .csum_start = start, .csum_offset = offset};
	unsigned int byte;

	memcpy(area + desc.addr - sizeof(m), &m, sizeof(m));
	for (; sscanf(hex, "%2x", &byte) == 1 && desc.len < CHUNK - desc.addr; hex += 2)
		area[desc.addr + desc.len++] = byte;
	return desc;
}

int main(int argc, char **argv)
{
	struct rlimit all = {RLIM_INFINITY, RLIM_INFINITY};
	struct sockaddr_xdp at = {.sxdp_family = AF_XDP, .sxdp_flags = XDP_COPY};
	struct xdp_mmap_offsets offsets;
	socklen_t len = sizeof(offsets);
	struct registration r = {.len = SLOTS * CHUNK, .chunk_size = CHUNK, .flags = UMEM_TX_METADATA_LEN,
	                         .tx_metadata_len = sizeof(struct metadata)};
	char *area, *tx;
	int s;

	if (argc != 5)
		return 2;
	setrlimit(RLIMIT_MEMLOCK, &all); /* whoever may not has room for this much */
	check(s = socket(AF_XDP, SOCK_RAW, 0), "socket");
	area = mmap(NULL, r.len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	check(area == MAP_FAILED ? -1 : 0, "mmap");
	r.addr = (uintptr_t)area;
	check(setsockopt(s, SOL_XDP, XDP_UMEM_REG, &r, sizeof(r)), "XDP_UMEM_REG");
	ring(s, XDP_UMEM_FILL_RING);
	ring(s, XDP_UMEM_COMPLETION_RING);
	ring(s, XDP_TX_RING);
	check(getsockopt(s, SOL_XDP, XDP_MMAP_OFFSETS, &offsets, &len), "XDP_MMAP_OFFSETS");
	tx = mmap(NULL, offsets.tx.desc + SLOTS * sizeof(struct xdp_desc), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, s,
	          XDP_PGOFF_TX_RING);
	check(tx == MAP_FAILED ? -1 : 0, "mmap of the ring");
	at.sxdp_ifindex = if_nametoindex(argv[1]);
	check(bind(s, (struct sockaddr *)&at, sizeof(at)), "bind");
	*(struct xdp_desc *)(tx + offsets.tx.desc) = fill(area, argv[4], atoi(argv[2]), atoi(argv[3]));
	__atomic_store_n((uint32_t *)(tx + offsets.tx.producer), 1, __ATOMIC_RELEASE);
	check(sendto(s, NULL, 0, MSG_DONTWAIT, NULL, 0), "sendto");
	puts("sent");
	return 0;
}
