/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Protection domains and memory regions. Pages of a region become memory that the router has mapped
 * where they can (remap.c); to and from others it copies by system calls. */

#include "verbs/internal.h"
#include "verbs/remap.h"

/* Hints. */
#define ACCESS_HINTS (IBV_ACCESS_HUGETLB | IBV_ACCESS_OPTIONAL_RANGE)

struct mr {
	struct ibv_mr base;
	uint64_t iova;
	unsigned int access;
	struct registration registration;
};

VERSION_1_1(ibv_alloc_pd);
PUBLIC struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct verbs_plain_request request;
	struct verbs_object_reply reply;
	struct ibv_pd *pd = calloc(1, sizeof(*pd));
	int error = ENOMEM;

	if (pd)
		error = control_request(context_of(context), VERBS_ALLOC_PD, &request, sizeof(request),
		                        &reply, sizeof(reply), NULL, 0);
	if (error) {
		free(pd);
		errno = error;
		return NULL;
	}
	pd->context = context;
	pd->handle = reply.object;
	return pd;
}

VERSION_1_1(ibv_dealloc_pd);
PUBLIC int ibv_dealloc_pd(struct ibv_pd *pd)
{
	int error = control_destroy(context_of(pd->context), VERBS_DEALLOC_PD, pd->handle);

	if (!error)
		free(pd);
	return error;
}

/* Registers bytes, as those of this region. Returns 0 or an errno. */
static int register_bytes(struct mr *mr, struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                          unsigned int access)
{
	struct verbs_reg_mr_request request = {
	        .address = (uintptr_t)addr,
	        .length = length,
	        .iova = iova,
	        .pd = pd->handle,
	        .access = access & ~(unsigned int)ACCESS_HINTS,
	};
	struct context *c = context_of(pd->context);
	struct verbs_reg_mr_reply reply;
	int error;

	remap_begin(c, &mr->registration, addr, length, &request.memory, &request.memory_offset);
	error = control_request(c, VERBS_REG_MR, &request, sizeof(request), &reply, sizeof(reply), NULL, 0);
	if (error) {
		remap_end(&mr->registration);
		return error;
	}
	mr->base = (struct ibv_mr){
	        .context = pd->context,
	        .pd = pd,
	        .addr = addr,
	        .length = length,
	        .handle = reply.mr,
	        .lkey = reply.lkey,
	        .rkey = reply.rkey,
	};
	mr->iova = iova;
	mr->access = access;
	return 0;
}

/* Ends a region at the router. */
static int forget_bytes(struct mr *mr)
{
	int error = control_destroy(context_of(mr->base.context), VERBS_DEREG_MR, mr->base.handle);

	if (!error) {
		mr->base.handle = 0;
		remap_end(&mr->registration);
	}
	return error;
}

PUBLIC struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                                       unsigned int access)
{
	struct mr *mr = calloc(1, sizeof(*mr));
	int error = mr ? register_bytes(mr, pd, addr, length, iova, access) : ENOMEM;

	if (error) {
		free(mr);
		errno = error;
		return NULL;
	}
	return &mr->base;
}

/* As the specification has it, a region that ends and another one with other keys. */
VERSION_1_1(ibv_rereg_mr);
PUBLIC int ibv_rereg_mr(struct ibv_mr *base, int flags, struct ibv_pd *pd, void *addr, size_t length,
                        int access)
{
	struct mr *mr = (struct mr *)base;
	struct mr now = *mr;
	int known = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
	int error;

	if (flags & ~known || (flags & IBV_REREG_MR_CHANGE_TRANSLATION && (!addr || length == 0)) ||
	    (flags & IBV_REREG_MR_CHANGE_PD && (!pd || pd->context != base->context)) ||
	    (access && !(flags & IBV_REREG_MR_CHANGE_ACCESS))) {
		errno = EINVAL;
		return IBV_REREG_MR_ERR_INPUT;
	}
	if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) {
		now.base.addr = addr;
		now.base.length = length;
		now.iova = (uintptr_t)addr;
	}
	if (flags & IBV_REREG_MR_CHANGE_PD)
		now.base.pd = pd;
	if (flags & IBV_REREG_MR_CHANGE_ACCESS)
		now.access = (unsigned int)access;
	error = forget_bytes(mr);
	if (!error)
		error = register_bytes(mr, now.base.pd, now.base.addr, now.base.length, now.iova, now.access);
	if (error) {
		errno = error;
		return IBV_REREG_MR_ERR_CMD;
	}
	return 0;
}

PUBLIC struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, iova, (unsigned int)access);
}

VERSION_1_1(ibv_reg_mr);
PUBLIC struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, (unsigned int)access);
}

VERSION_1_1(ibv_dereg_mr);
PUBLIC int ibv_dereg_mr(struct ibv_mr *mr)
{
	/* ibv_rereg_mr may have failed. */
	int error = mr->handle ? forget_bytes((struct mr *)mr) : 0;

	if (!error)
		free(mr);
	return error;
}

/* A child has its own copy of all pages, and the router reaches those of the parent only: nothing
 * has to be asked for. */

PUBLIC int ibv_fork_init(void)
{
	return 0;
}

PUBLIC enum ibv_fork_status ibv_is_fork_initialized(void)
{
	return IBV_FORK_UNNEEDED;
}

PUBLIC int ibv_dontfork_range(void *base, size_t size);
PUBLIC int ibv_dontfork_range(void *base, size_t size)
{
	(void)base, (void)size;
	return 0;
}

PUBLIC int ibv_dofork_range(void *base, size_t size);
PUBLIC int ibv_dofork_range(void *base, size_t size)
{
	(void)base, (void)size;
	return 0;
}
