//! Objects by handles that a container cannot guess its way around with: a handle whose object is
//! gone stays wrong for a long time, because it has the number of times that its place was used.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Objects by handle. A handle is the index of a place and, above it, the place's generation, which
/// is never 0: so no handle is 0.
pub(crate) struct Table<T> {
    places: Vec<Place<T>>,
    /// Places that have an object: few of those that there are, and looked through all the time.
    used: BTreeSet<u32>,
    /// Free places, the one that has been free for the longest time first.
    free: VecDeque<u32>,
    /// Objects whose handles somebody else chose.
    chosen: BTreeMap<u32, T>,
    index_bits: u32,
    handle_bits: u32,
}

/// New places are used before old ones as long as there are fewer.
const FEW: usize = 1024;

struct Place<T> {
    generation: u32,
    object: Option<T>,
}

impl<T> Table<T> {
    /// A table of at most `2^index_bits` objects whose handles have `handle_bits` bits.
    pub(crate) fn new(index_bits: u32, handle_bits: u32) -> Self {
        Self {
            places: Vec::new(),
            used: BTreeSet::new(),
            free: VecDeque::new(),
            chosen: BTreeMap::new(),
            index_bits,
            handle_bits,
        }
    }

    /// Takes an object in, and gives it a handle. `skip` is how many generations of the place are
    /// left out: a random number makes handles hard to guess. `None` if the table is full.
    pub(crate) fn insert(&mut self, object: T, skip: u32) -> Option<u32> {
        // A place is not used again soon.
        let place = if self.places.len() < FEW { None } else { self.free.pop_front() };
        let place = place.or_else(|| {
            let full = self.places.len() >= 1 << self.index_bits;
            if full { self.free.pop_front() } else { None }
        });
        let index = match place {
            Some(index) => index,
            None if self.places.len() < 1 << self.index_bits => {
                self.places.push(Place { generation: 0, object: None });
                u32::try_from(self.places.len() - 1).ok()?
            }
            None => return None,
        };
        let most = (1 << (self.handle_bits - self.index_bits)) - 1;
        let place = &mut self.places[index as usize];
        // 1 to `most`.
        place.generation = (place.generation + skip % most) % most + 1;
        while self.chosen.contains_key(&(place.generation << self.index_bits | index)) {
            place.generation = place.generation % most + 1;
        }
        place.object = Some(object);
        self.used.insert(index);
        Some(place.generation << self.index_bits | index)
    }

    /// Takes an object in at a handle that somebody else chose. `None` if it is another object's.
    pub(crate) fn insert_as(&mut self, handle: u32, object: T) -> Option<u32> {
        if handle == 0 || self.get(handle).is_some() {
            return None;
        }
        self.chosen.insert(handle, object);
        Some(handle)
    }

    fn index(&self, handle: u32) -> Option<usize> {
        let index = (handle & ((1 << self.index_bits) - 1)) as usize;
        let place = self.places.get(index)?;
        (place.object.is_some() && u64::from(handle) >> self.index_bits == place.generation.into())
            .then_some(index)
    }

    pub(crate) fn get(&self, handle: u32) -> Option<&T> {
        match self.index(handle) {
            Some(index) => self.places[index].object.as_ref(),
            None => self.chosen.get(&handle),
        }
    }

    pub(crate) fn get_mut(&mut self, handle: u32) -> Option<&mut T> {
        match self.index(handle) {
            Some(index) => self.places[index].object.as_mut(),
            None => self.chosen.get_mut(&handle),
        }
    }

    pub(crate) fn remove(&mut self, handle: u32) -> Option<T> {
        let Some(index) = self.index(handle) else { return self.chosen.remove(&handle) };
        let place = u32::try_from(index).ok()?;
        self.used.remove(&place);
        self.free.push_back(place);
        self.places[index].object.take()
    }

    /// Objects in places from one on: place, handle, object. After the places are the objects with
    /// handles of others' choice.
    pub(crate) fn iter_from(&self, first: u32) -> impl Iterator<Item = (u32, u32, &T)> {
        let places = self.used.range(first..).filter_map(|index| {
            let place = self.places.get(*index as usize)?;
            Some((*index, place.generation << self.index_bits | index, place.object.as_ref()?))
        });
        let behind = 1 << self.index_bits;
        let chosen = self.chosen.range(first.saturating_sub(behind)..);
        places.chain(
            chosen.map(move |(handle, object)| (handle.saturating_add(behind), *handle, object)),
        )
    }

    /// Places that are free.
    pub(crate) fn free(&self) -> u64 {
        let used = self.places.len() - self.free.len() + self.chosen.len();
        (1_u64 << self.index_bits).saturating_sub(used as u64)
    }

    /// The handles of all objects.
    pub(crate) fn handles(&self) -> Vec<u32> {
        self.iter().map(|(handle, _)| handle).collect()
    }

    /// All objects with their handles.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.iter_from(0).map(|(_, handle, object)| (handle, object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_ends_with_its_object() {
        let mut table = Table::new(2, 6);
        let first = table.insert('a', 0).unwrap();
        assert_eq!((table.get(first), table.get(0)), (Some(&'a'), None));
        assert_eq!(table.remove(first), Some('a'));
        assert_eq!(table.get(first), None);
        assert_eq!(table.remove(first), None);
        let mut seen = vec![first];
        for _ in 0..14 {
            let next = table.insert('b', 0).unwrap();
            assert!(!seen.contains(&next) && next != 0 && next < 64);
            seen.push(next);
            table.remove(next);
        }
    }

    #[test]
    fn a_chosen_handle_is_nobody_elses() {
        let mut table = Table::new(2, 6);
        let first = table.insert('a', 0).unwrap();
        assert_eq!(table.insert_as(first, 'b'), None);
        assert_eq!(table.insert_as(0, 'b'), None);
        // What the next place would give.
        assert_eq!(table.insert_as(1 << 2 | 1, 'c'), Some(5));
        let second = table.insert('d', 0).unwrap();
        assert_ne!(second, 5);
        assert_eq!((table.get(5), table.get(second)), (Some(&'c'), Some(&'d')));
        assert_eq!(table.insert_as(3, 'e'), Some(3));
        assert_eq!(table.handles(), [first, second, 3, 5]);
        // A reader that goes on where it was finds each once.
        let (cursor, _, _) = table.iter_from(0).nth(3).unwrap();
        assert_eq!(table.iter_from(cursor).map(|(_, h, _)| h).collect::<Vec<_>>(), [5]);
        assert_eq!((table.remove(5), table.remove(5)), (Some('c'), None));
        assert_eq!(table.free(), 1);
    }

    #[test]
    fn a_full_table_takes_no_more() {
        let mut table = Table::new(2, 6);
        for i in 0..4 {
            assert!(table.insert(i, 99).is_some());
        }
        assert!(table.insert(4, 0).is_none());
        let handles: Vec<u32> = table.iter().map(|(handle, _)| handle).collect();
        assert_eq!(handles.iter().filter_map(|h| table.get(*h)).count(), 4);
    }
}
