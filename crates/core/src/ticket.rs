//! Which pushes count, and with which weight: read off the one thing that every framework hands from the backward to the
//! optimizer, the gradient of a trainable variable.
//!
//! Push number q answers with a ticket of zeros but for row q mod 64 = `UNIT` * [1, mark(q)]. Whatever is done linearly to
//! gradients (loss scale, own factors, sums over calls, skipped steps) is done to the tickets, so that a row of their sum
//! says with which weight its push counts, and the mark proves which turn of the ring it is.

use std::collections::VecDeque;

/// Number of pushes that tickets can distinguish at one time.
pub const RING: u64 = 64;
/// Floats in a ticket, `(RING, 2)` row-major.
pub const TICKET_LEN: usize = RING as usize * 2;
/// Small, so that norms which users take over all gradients do not see tickets; a power of two, so that it is exact.
pub const UNIT: f32 = 1.0 / (1 << 20) as f32;
/// Relative error that scaling and adding leave in the mark; marks of turns that may be confused differ by far more.
const TOLERANCE: f64 = 3e-6;

/// Second entry of the ticket's row: differs from one turn of the ring to the next.
pub fn mark(number: u64) -> f32 {
    (0.5 + (number / RING) as f64 * 0.618_033_988_749_895 % 1.0) as f32
}

/// The ticket of a push; not a number if the pushed gradient is not finite, as loss scaling expects of a gradient.
pub fn write_ticket(number: u64, is_finite: bool, ticket: &mut [f32]) {
    ticket.fill(0.0);
    let row = (number % RING) as usize * 2;
    ticket[row] = if is_finite { UNIT } else { f32::NAN };
    ticket[row + 1] = if is_finite { UNIT * mark(number) } else { f32::NAN };
}

/// A push that a ticket names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Named {
    pub number: u64,
    pub weight: f32,
}

/// Pushes that wait for a ticket to name them.
pub struct PushRing<P> {
    /// Number of the next push; the first is 1.
    next: u64,
    pending: VecDeque<(u64, P)>,
}

impl<P> Default for PushRing<P> {
    fn default() -> Self {
        PushRing { next: 1, pending: VecDeque::new() }
    }
}

impl<P> PushRing<P> {
    pub fn len(&self) -> usize {
        self.pending.len()
    }

    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &P> {
        self.pending.iter().map(|(_, push)| push)
    }

    /// The push of this number, if it waits.
    pub fn get(&self, number: u64) -> Option<&P> {
        self.pending.iter().find(|(n, _)| *n == number).map(|(_, push)| push)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut P> {
        self.pending.iter_mut().map(|(_, push)| push)
    }

    pub fn clear(&mut self) {
        self.pending.clear();
    }

    /// Number that the next push will have.
    pub fn next_number(&self) -> u64 {
        self.next
    }

    /// Numbers of the pushes that wait, ascending.
    pub fn numbers(&self) -> impl Iterator<Item = u64> {
        self.pending.iter().map(|&(number, _)| number)
    }

    /// Keeps a push; gives its number, and the push whose place in the ring it takes.
    pub fn add(&mut self, push: P) -> (u64, Option<P>) {
        let number = self.next;
        self.next += 1;
        let oldest = self.pending.front().is_some_and(|&(q, _)| q + RING <= number);
        let fallen = oldest.then(|| self.pending.pop_front()).flatten().map(|(_, push)| push);
        self.pending.push_back((number, push));
        (number, fallen)
    }

    /// The pushes that `ticket` names, in the order in which they were made. Changes nothing.
    ///
    /// # Errors
    /// What is wrong with a ticket that names a push which is not pending: applied before, fallen out of the ring, or mixed
    /// with another in its row.
    pub fn resolve(&self, ticket: &[f32]) -> Result<Vec<Named>, String> {
        let mut named = Vec::new();
        for row in 0..RING {
            let (weight, proof) = (ticket[row as usize * 2], ticket[row as usize * 2 + 1]);
            if weight == 0.0 && proof == 0.0 {
                continue;
            }
            let push = self.pending.iter().map(|&(number, _)| number).find(|number| number % RING == row);
            let is_proven = |number: u64| {
                let (weight, proof) = (f64::from(weight), f64::from(proof));
                !weight.is_finite() || (proof / weight - f64::from(mark(number))).abs() <= TOLERANCE
            };
            match push {
                Some(number) if is_proven(number) => named.push(Named { number, weight: weight / UNIT }),
                _ => return Err(gone(row, weight / UNIT, self.pending.len())),
            }
        }
        named.sort_unstable_by_key(|n| n.number);
        Ok(named)
    }

    /// Takes out the pushes that `resolve` gave and drops those that are older than the oldest of them: they leaked from
    /// skipped steps, or from tapes that nobody asked. Gives the named ones, then the dropped ones.
    pub fn take(&mut self, named: &[Named]) -> (Vec<(f32, P)>, Vec<P>) {
        let Some(oldest) = named.first().map(|n| n.number) else { return (Vec::new(), Vec::new()) };
        let (mut taken, mut dropped, mut kept) = (Vec::new(), Vec::new(), VecDeque::new());
        for (number, push) in self.pending.drain(..) {
            match named.iter().find(|n| n.number == number) {
                Some(n) => taken.push((n.weight, push)),
                None if number < oldest => dropped.push(push),
                None => kept.push_back((number, push)),
            }
        }
        self.pending = kept;
        (taken, dropped)
    }
}

/// What is wrong with a ticket that names a push which is not pending.
pub fn gone(row: u64, weight: f32, pending: usize) -> String {
    format!(
        "a gradient is applied whose push is gone: applied before, or older than the newest {RING} backward passes \
         (row {row}, weight {weight}, {pending} pending). Nothing was changed"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(pushes: u64) -> (PushRing<u64>, Vec<[f32; TICKET_LEN]>) {
        let mut ring = PushRing::default();
        let tickets = (1..=pushes).map(|q| {
            let (number, _) = ring.add(q);
            assert_eq!(number, q);
            let mut ticket = [0.0; TICKET_LEN];
            write_ticket(number, true, &mut ticket);
            ticket
        });
        let tickets = tickets.collect();
        (ring, tickets)
    }

    fn combine(tickets: &[[f32; TICKET_LEN]], parts: &[(usize, f32)]) -> [f32; TICKET_LEN] {
        let mut sum = [0.0; TICKET_LEN];
        for &(i, weight) in parts {
            sum.iter_mut().zip(&tickets[i]).for_each(|(s, t)| *s += t * weight);
        }
        sum
    }

    #[test]
    fn any_subset_is_read_off_with_its_weights() {
        let (mut ring, tickets) = ring(70);
        let named = ring.resolve(&combine(&tickets, &[(69, 3.0), (10, -0.25)])).unwrap();
        assert_eq!(named, [Named { number: 11, weight: -0.25 }, Named { number: 70, weight: 3.0 }]);
        let (taken, dropped) = ring.take(&named);
        assert_eq!(taken, [(-0.25, 11), (3.0, 70)]);
        assert_eq!(dropped, [7, 8, 9, 10]);
        assert_eq!(ring.len(), 58);
        assert!(ring.resolve(&combine(&tickets, &[(69, 1.0)])).is_err(), "applied before");
        assert!(ring.resolve(&combine(&tickets, &[(30, 1.0)])).is_ok());
    }

    #[test]
    fn a_push_that_fell_out_of_the_ring_is_refused_never_guessed() {
        let (ring, tickets) = ring(70);
        assert_eq!(ring.len(), 64);
        assert!(ring.resolve(&combine(&tickets, &[(0, 1.0)])).is_err());
        // Row 1 holds both the first and the 65th: their sum proves neither.
        assert!(ring.resolve(&combine(&tickets, &[(0, 1.0), (64, 1.0)])).is_err());
        assert!(ring.resolve(&combine(&tickets, &[(64, 1.0)])).is_ok());
    }

    #[test]
    fn gradients_that_are_not_finite_keep_their_name() {
        let mut ring = PushRing::default();
        let (number, _) = ring.add(());
        let mut ticket = [0.0; TICKET_LEN];
        write_ticket(number, false, &mut ticket);
        let named = ring.resolve(&ticket).unwrap();
        assert_eq!(named[0].number, number);
        assert!(named[0].weight.is_nan());
    }

    #[test]
    fn a_scaled_ticket_is_still_proven() {
        let (ring, tickets) = ring(64);
        for scale in [1e-12, 1.0 / 3.0, 0.1, 65536.0, 1e25] {
            let ticket = combine(&tickets, &[(5, scale)]);
            assert_eq!(ring.resolve(&ticket).unwrap()[0].number, 6);
        }
    }
}
