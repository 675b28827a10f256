/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Open addressing with linear probing: at most half of the places are used. */

#include "verbs/internal.h"

static void put(struct table *t, uint32_t key, void *object)
{
	uint32_t i = table_place(t, key);

	while (t->entries[i].key)
		i = (i + 1) & (t->size - 1);
	t->entries[i] = (struct table_entry){key, object};
	t->used++;
}

int table_insert(struct table *t, uint32_t key, void *object)
{
	if (2 * (t->used + 1) > t->size) {
		struct table larger = {.size = t->size ? 2 * t->size : 8};

		larger.entries = calloc(larger.size, sizeof(*larger.entries));
		if (!larger.entries)
			return ENOMEM;
		for (uint32_t i = 0; i < t->size; i++)
			if (t->entries[i].key)
				put(&larger, t->entries[i].key, t->entries[i].object);
		free(t->entries);
		*t = larger;
	}
	put(t, key, object);
	return 0;
}

void table_remove(struct table *t, uint32_t key)
{
	uint32_t i;

	if (!table_find(t, key))
		return;
	for (i = table_place(t, key); t->entries[i].key != key; i = (i + 1) & (t->size - 1))
		;
	t->entries[i].key = 0;
	t->used--;
	/* What came to lie behind it because this place was taken is put in again. */
	for (i = (i + 1) & (t->size - 1); t->entries[i].key; i = (i + 1) & (t->size - 1)) {
		struct table_entry moved = t->entries[i];

		t->entries[i].key = 0;
		t->used--;
		put(t, moved.key, moved.object);
	}
}

void table_free(struct table *t)
{
	free(t->entries);
	*t = (struct table){0};
}
