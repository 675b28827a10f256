/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Address handles. */

#include "verbs/internal.h"

void address_to_wire(struct verbs_address *to, const struct ibv_ah_attr *from)
{
	*to = (struct verbs_address){
	        .flow_label = from->grh.flow_label,
	        .dlid = from->dlid,
	        .sgid_index = from->grh.sgid_index,
	        .hop_limit = from->grh.hop_limit,
	        .traffic_class = from->grh.traffic_class,
	        .sl = from->sl,
	        .src_path_bits = from->src_path_bits,
	        .static_rate = from->static_rate,
	        .is_global = from->is_global,
	        .port = from->port_num,
	};
	memcpy(to->gid, from->grh.dgid.raw, sizeof(to->gid));
}

void address_from_wire(struct ibv_ah_attr *to, const struct verbs_address *from)
{
	*to = (struct ibv_ah_attr){
	        .grh.flow_label = from->flow_label,
	        .grh.sgid_index = from->sgid_index,
	        .grh.hop_limit = from->hop_limit,
	        .grh.traffic_class = from->traffic_class,
	        .dlid = from->dlid,
	        .sl = from->sl,
	        .src_path_bits = from->src_path_bits,
	        .static_rate = from->static_rate,
	        .is_global = from->is_global,
	        .port_num = from->port,
	};
	memcpy(to->grh.dgid.raw, from->gid, sizeof(from->gid));
}

VERSION_1_1(ibv_create_ah);
PUBLIC struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	struct verbs_create_ah_request request = {.pd = pd->handle};
	struct verbs_object_reply reply;
	struct ibv_ah *ah = calloc(1, sizeof(*ah));
	int error = ENOMEM;

	address_to_wire(&request.address, attr);
	if (ah)
		error = control_request(context_of(pd->context), VERBS_CREATE_AH, &request, sizeof(request),
		                        &reply, sizeof(reply), NULL, 0);
	if (error) {
		free(ah);
		errno = error;
		return NULL;
	}
	*ah = (struct ibv_ah){.context = pd->context, .pd = pd, .handle = reply.object};
	return ah;
}

VERSION_1_1(ibv_destroy_ah);
PUBLIC int ibv_destroy_ah(struct ibv_ah *ah)
{
	int error = control_destroy(context_of(ah->context), VERBS_DESTROY_AH, ah->handle);

	if (!error)
		free(ah);
	return error;
}

PUBLIC int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port, struct ibv_wc *wc,
                               struct ibv_grh *grh, struct ibv_ah_attr *attr)
{
	*attr = (struct ibv_ah_attr){
	        .dlid = wc->slid, .sl = wc->sl, .src_path_bits = wc->dlid_path_bits, .port_num = port};
	if (!(wc->wc_flags & IBV_WC_GRH))
		return 0;
	uint32_t flow = __builtin_bswap32(grh->version_tclass_flow);
	union ibv_gid own;
	int index = 0;

	/* The answer goes from where the message went to. */
	while (ibv_query_gid(context, port, index, &own) == 0 &&
	       memcmp(own.raw, grh->dgid.raw, sizeof(own.raw)))
		index++;
	if (ibv_query_gid(context, port, index, &own))
		return -1;
	attr->is_global = 1;
	attr->grh = (struct ibv_global_route){
	        .dgid = grh->sgid,
	        .sgid_index = (uint8_t)index,
	        .flow_label = flow & 0xfffff,
	        .traffic_class = (flow >> 20) & 0xff,
	        .hop_limit = 0xff,
	};
	return 0;
}

PUBLIC struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh,
                                            uint8_t port)
{
	struct ibv_ah_attr attr;

	if (ibv_init_ah_from_wc(pd->context, port, wc, grh, &attr))
		return NULL;
	return ibv_create_ah(pd, &attr);
}
