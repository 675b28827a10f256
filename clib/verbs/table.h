/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Objects by a number other than 0. All zero is an empty table. The owner's lock guards it. */
#ifndef HEDDLE_VERBS_TABLE_H
#define HEDDLE_VERBS_TABLE_H

#include <stddef.h>
#include <stdint.h>

struct table_entry {
	uint32_t key; /* 0: free */
	void *object;
};

struct table {
	struct table_entry *entries;
	uint32_t size; /* a power of two, or 0 */
	uint32_t used;
};

/* Returns 0, or ENOMEM. The key is not in the table. */
int table_insert(struct table *t, uint32_t key, void *object);
void table_remove(struct table *t, uint32_t key);
void table_free(struct table *t);

static inline uint32_t table_place(const struct table *t, uint32_t key)
{
	return (key * 2654435769u >> 7) & (t->size - 1);
}

static inline void *table_find(const struct table *t, uint32_t key)
{
	if (t->size == 0 || key == 0)
		return NULL;
	for (uint32_t i = table_place(t, key); t->entries[i].key; i = (i + 1) & (t->size - 1))
		if (t->entries[i].key == key)
			return t->entries[i].object;
	return NULL;
}

#endif
