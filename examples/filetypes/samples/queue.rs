use std::collections::VecDeque;

/// A queue that forgets its oldest entry when it is full.
pub struct Ring<T> {
    items: VecDeque<T>,
    capacity: usize,
}

impl<T> Ring<T> {
    pub fn new(capacity: usize) -> Self {
        assert!(capacity > 0, "a ring needs room for one item");
        Self { items: VecDeque::with_capacity(capacity), capacity }
    }

    pub fn push(&mut self, item: T) -> Option<T> {
        let oldest = if self.items.len() == self.capacity { self.items.pop_front() } else { None };
        self.items.push_back(item);
        oldest
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.items.iter()
    }
}
