//! Tickets, from which a commit reads which pushes count, and with which weight. A ticket is the gradient of a trainable variable,
//! because every framework hands such gradients from the backward pass to the optimizer.
//!
//! The ticket of push number q is zeros, but for row q mod 64, which is `UNIT` * [1, mark(q)]. All linear operations on gradients
//! (loss scale, own factors, sums over calls, skipped steps) apply to tickets too. So a row of the sum of several tickets holds the
//! weight of its push, and the mark proves to which turn of the ring the push belongs. Groups of tables begin with different turns, so
//! that the ticket of one names no push of another.

use std::collections::VecDeque;

use xxhash_rust::xxh3::xxh3_64;

/// Number of pushes that tickets can distinguish at one time.
pub const RING: u64 = 64;
/// Floats in a ticket, `(RING, 2)` row-major.
pub const TICKET_LEN: usize = RING as usize * 2;
/// Value in a ticket that stands for weight 1. It is small, so that tickets hardly change norms that users take over all gradients.
/// It is a power of two, so that multiplications by it are exact.
pub const UNIT: f32 = 1.0 / (1 << 20) as f32;
/// Error that scaling and adding may leave in a mark. The marks of turns that could be confused differ by far more.
const TOLERANCE: f64 = 3e-6;
/// Turns of the ring with which groups begin. The numbers of later turns are still exact in the mark.
const FIRST_TURNS: u64 = 1 << 16;

/// Returns the mark of a push, which differs from one turn of the ring to the next.
pub fn mark(number: u64) -> f32 {
    (0.5 + (number / RING) as f64 * 0.618_033_988_749_895 % 1.0) as f32
}

/// Writes the ticket of push `number`. Its row is NaN if the pushed gradient is not finite, because loss scaling looks for that.
pub fn write_ticket(number: u64, is_finite: bool, ticket: &mut [f32]) {
    ticket.fill(0.0);
    let row = (number % RING) as usize * 2;
    ticket[row] = if is_finite { UNIT } else { f32::NAN };
    ticket[row + 1] = if is_finite { UNIT * mark(number) } else { f32::NAN };
}

/// A push that a ticket names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Named {
    /// Number of the push.
    pub number: u64,
    /// Factor of its gradients.
    pub weight: f32,
}

/// Pushes that wait for a ticket to name them.
pub struct PushRing<P> {
    /// Number of the next push.
    next: u64,
    pending: VecDeque<(u64, P)>,
}

impl<P> PushRing<P> {
    /// The ring of a group of tables with these names. All ranks number their pushes alike.
    pub fn of<'a>(tables: impl Iterator<Item = &'a str>) -> PushRing<P> {
        let names: Vec<&str> = tables.collect();
        let turn = xxh3_64(names.join("\n").as_bytes()) % FIRST_TURNS;
        PushRing { next: RING * turn + 1, pending: VecDeque::new() }
    }

    /// Number of pushes that wait.
    pub fn len(&self) -> usize {
        self.pending.len()
    }

    /// Whether no push waits.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Returns the pushes that wait, the oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &P> {
        self.pending.iter().map(|(_, push)| push)
    }

    /// Returns the push with this number, if it waits.
    pub fn get(&self, number: u64) -> Option<&P> {
        self.pending.iter().find(|(n, _)| *n == number).map(|(_, push)| push)
    }

    /// Returns the push with this number for changes, if it waits.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut P> {
        self.pending.iter_mut().find(|(n, _)| *n == number).map(|(_, push)| push)
    }

    /// Removes the push with this number, if it waits.
    pub fn remove(&mut self, number: u64) -> Option<P> {
        let at = self.pending.iter().position(|&(n, _)| n == number)?;
        self.pending.remove(at).map(|(_, push)| push)
    }

    /// Returns the pushes that wait for changes, the oldest first.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut P> {
        self.pending.iter_mut().map(|(_, push)| push)
    }

    /// Drops all pushes that wait.
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

    /// Adds a push. Returns its number, and the push whose place in the ring it takes, if there was one.
    pub fn add(&mut self, push: P) -> (u64, Option<P>) {
        let number = self.next;
        self.next += 1;
        let oldest = self.pending.front().is_some_and(|&(q, _)| q + RING <= number);
        let fallen = oldest.then(|| self.pending.pop_front()).flatten().map(|(_, push)| push);
        self.pending.push_back((number, push));
        (number, fallen)
    }

    /// Returns the pushes that `ticket` names, in the order in which they were made. Changes nothing.
    ///
    /// # Errors
    /// A message if the ticket names a push that does not wait: it was applied before, fell out of the ring, or is mixed with
    /// another push in its row.
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

    /// Removes the pushes that `resolve` returned, and all that are older than the oldest of them. The older ones were left by
    /// skipped steps, or by tapes whose gradients nobody used. Returns the named pushes with their weights, then the older ones.
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

/// Returns the message for a ticket that names a push which does not wait.
pub fn gone(row: u64, weight: f32, pending: usize) -> String {
    format!(
        "a gradient is applied whose push is gone: applied before, older than the newest {RING} backward passes, \
         or of other tables (row {row}, weight {weight}, {pending} pending). Nothing was changed"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty<P>() -> PushRing<P> {
        PushRing { next: 1, pending: VecDeque::new() }
    }

    fn ring(pushes: u64) -> (PushRing<u64>, Vec<[f32; TICKET_LEN]>) {
        let mut ring = empty();
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
        let mut ring = empty();
        let (number, _) = ring.add(());
        let mut ticket = [0.0; TICKET_LEN];
        write_ticket(number, false, &mut ticket);
        let named = ring.resolve(&ticket).unwrap();
        assert_eq!(named[0].number, number);
        assert!(named[0].weight.is_nan());
    }

    #[test]
    fn a_ticket_names_no_push_of_other_tables() {
        let mut rings = ["users", "items"].map(|name| PushRing::of([name].into_iter()));
        let tickets = rings.each_mut().map(|ring| {
            let mut ticket = [0.0; TICKET_LEN];
            write_ticket(ring.add(()).0, true, &mut ticket);
            ticket
        });
        for (of_ring, ring) in rings.iter().enumerate() {
            for (of_ticket, ticket) in tickets.iter().enumerate() {
                assert_eq!(ring.resolve(ticket).is_ok(), of_ring == of_ticket);
            }
        }
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
