//! The commit: gradients go to their owners, and all ranks agree that the step counts.

use super::at_owner::merge_bags;
use super::group::ShardedGroup;
use super::push::merge_sent;
use crate::contract::binding::Binding;
use crate::contract::group::Group;
use crate::contract::profile::StepPart;
use crate::contract::ticket::{Named, TICKET_LEN};
use crate::error::{Error, Result};
use crate::exchange::collectives::{agree, decide, exchange, gather};
use crate::exchange::communicator::Communicator;
use crate::exchange::message::{Call, Reader, Tag, Writer};
use crate::host::exact_sum::ExactSum;
use crate::host::group::ApplyScalars;
use crate::host::group::push::gone_lookup;
use crate::host::push::{OutputGradients, Push, PushedGradients, SavedLookup, Spare};
use crate::memory;
use crate::pool::Pool;

/// The gradients that all ranks have for a lookup, at the owner.
struct LookupGradients {
    /// Number of the lookup.
    lookup: u64,
    /// By rank: the factor of its gradients.
    weights: Vec<f32>,
    /// By table of the lookup: rows, those of rank 0 first.
    rows: Vec<Vec<f32>>,
    /// By rank and table: where its rows end.
    ends: Vec<usize>,
}

impl LookupGradients {
    fn of(lookup: &SavedLookup) -> LookupGradients {
        let rows = lookup.tables.iter().map(|_| Vec::new()).collect();
        LookupGradients { lookup: lookup.number, weights: Vec::new(), rows, ends: Vec::new() }
    }

    /// Reads the gradients that the next rank has sent. `pooled`: the bags that this rank has pooled for it, whose gradients are merged here.
    fn read(
        &mut self,
        lookup: &SavedLookup,
        pooled: &SavedLookup,
        spare: &mut [Spare],
        reader: &mut Reader,
        pool: &Pool,
    ) -> Result<()> {
        for (table, rows) in lookup.tables.iter().zip(&mut self.rows) {
            let keys = reader.number()? as usize;
            reader.append_rows(keys.saturating_mul(table.dim), rows)?;
        }
        let merged = merge_bags(pooled, reader, spare, pool)?;
        for (table, sums) in pooled.tables.iter().zip(merged) {
            let of_table = lookup
                .tables
                .iter()
                .zip(&mut self.rows)
                .find(|(of_lookup, _)| of_lookup.number == table.number);
            let num_keys: usize = table.runs().map(|(runs, _)| runs.num_keys()).sum();
            if let Some((_, rows)) = of_table {
                memory::reserve(rows, num_keys * table.dim, "the gradients of other ranks")?;
                rows.extend_from_slice(&sums[0][..num_keys * table.dim]);
            }
            spare[table.number].keep_sums(sums);
        }
        self.ends.extend(self.rows.iter().map(Vec::len));
        Ok(())
    }

    /// Returns the factor of all gradients. If the ranks have different ones, multiplies the rows of each.
    fn common_weight(&mut self) -> f32 {
        let first = self.weights[0];
        if self.weights.iter().all(|weight| weight.to_bits() == first.to_bits()) {
            return first;
        }
        let num_tables = self.rows.len();
        for (table, rows) in self.rows.iter_mut().enumerate() {
            let mut start = 0;
            for (rank, weight) in self.weights.iter().enumerate() {
                let end = self.ends[rank * num_tables + table];
                rows[start..end].iter_mut().for_each(|gradient| *gradient *= weight);
                start = end;
            }
        }
        1.0
    }
}

/// What a group does in a commit before all ranks have agreed.
#[derive(Default)]
struct Prepared {
    /// This rank's pushes.
    named: Vec<Named>,
    /// The pushes of the gradients of all ranks to the shard.
    of_shard: Vec<Named>,
}

/// Commits groups of one optimizer, as [`Group::commit`](crate::contract::group::Group::commit). All ranks must call it. Returns the
/// squared norm.
///
/// # Errors
/// The same, and [`Error::Rank`]. Nothing has changed then, on any rank.
pub(super) fn commit(
    groups: &mut [&mut ShardedGroup],
    bindings: &[Binding],
    tickets: &[&[f32]],
    is_update: bool,
    pool: &Pool,
) -> Result<f64> {
    let committed = commit_together(groups, bindings, tickets, is_update, pool);
    committed.inspect_err(|_| groups.iter().for_each(|group| group.shard.abandon_steps()))
}

fn commit_together(
    groups: &mut [&mut ShardedGroup],
    bindings: &[Binding],
    tickets: &[&[f32]],
    is_update: bool,
    pool: &Pool,
) -> Result<f64> {
    let first = &mut *groups[0];
    first.num_commits += 1;
    let (communicator, tag) = (first.communicator.clone(), first.tag(Call::Commit, first.num_commits));
    let mut prepared: Vec<Prepared> = groups.iter().map(|_| Prepared::default()).collect();
    let messages = write_gradients(groups, bindings, tickets, &mut prepared, pool);
    let start = groups[0].shard.stopwatch.start();
    let received = exchange(&*communicator, tag, messages)?;
    groups[0].shard.stopwatch.stop(StepPart::Exchange, start);
    let pushed = push_to_shards(groups, bindings, &received, &mut prepared, pool);
    drop(received);
    let needs_norm = is_update && bindings.iter().any(|binding| binding.needs_norm || binding.clips_norms());
    let vote = if needs_norm { agree } else { decide };
    if let Err(error) = vote(&*communicator, tag.at(1), pushed) {
        for (group, prepared) in groups.iter_mut().zip(prepared) {
            prepared.of_shard.iter().for_each(|push| group.shard.cancel_push(push.number));
        }
        return Err(error);
    }
    for (group, prepared) in groups.iter_mut().zip(&prepared) {
        group.take_pushes(prepared, pool)?;
    }
    if !needs_norm {
        return Ok(0.0);
    }
    let norm = add_norms(groups, &*communicator, tag, pool);
    // A rank that is lost meanwhile leaves some ranks without its squares. Then no rank makes the step.
    decide(&*communicator, tag.at(3), norm).inspect_err(|_| {
        groups.iter_mut().for_each(|group| group.shard.drop_committed());
    })
}

/// Adds the squares of all ranks. Returns the squared norm of all gradients.
fn add_norms(
    groups: &mut [&mut ShardedGroup],
    communicator: &dyn Communicator,
    tag: Tag,
    pool: &Pool,
) -> Result<f64> {
    let squares = groups.iter_mut().map(|group| group.own_squares(pool)).collect::<Result<Vec<_>>>();
    let received = gather(communicator, tag.at(2), squares.and_then(|squares| write_squares(&squares)))?;
    let mut readers: Vec<Reader> =
        received.iter().enumerate().map(|(from, message)| Reader::new(message, from)).collect();
    let mut total = 0.0;
    for group in groups {
        total += group.set_norms(&mut readers)?;
    }
    Ok(total)
}

/// Merges the gradients that the tickets name, and writes them to their owners. Changes nothing that counts.
fn write_gradients(
    groups: &mut [&mut ShardedGroup],
    bindings: &[Binding],
    tickets: &[&[f32]],
    prepared: &mut [Prepared],
    pool: &Pool,
) -> Result<Vec<Vec<u8>>> {
    let world_size = groups[0].communicator.world_size();
    let mut writers: Vec<Writer> = (0..world_size).map(|to| groups[0].writer_to(to)).collect();
    for (((group, binding), ticket), prepared) in groups.iter_mut().zip(bindings).zip(tickets).zip(prepared) {
        group.check_owner(binding)?;
        prepared.named = group.resolve(ticket)?;
        group.merge_held(&prepared.named, pool)?;
        for (to, writer) in writers.iter_mut().enumerate() {
            group.write_pushes(&prepared.named, to, writer)?;
        }
    }
    Ok(writers.into_iter().map(Writer::finish).collect())
}

/// Gives the gradients of all ranks to the shards, which do not take them yet.
fn push_to_shards(
    groups: &mut [&mut ShardedGroup],
    bindings: &[Binding],
    received: &[Vec<u8>],
    prepared: &mut [Prepared],
    pool: &Pool,
) -> Result<()> {
    let mut readers: Vec<Reader> =
        received.iter().enumerate().map(|(from, message)| groups[0].reader_of(message, from)).collect();
    for ((group, binding), prepared) in groups.iter_mut().zip(bindings).zip(prepared) {
        group.take_over(binding)?;
        let lookups = group.read_pushes(&prepared.named, &mut readers, pool)?;
        for gradients in lookups {
            let named = group.push_to_shard(gradients, pool)?;
            prepared.of_shard.push(named);
        }
        group.shard.check_absent(&prepared.of_shard)?;
    }
    readers.into_iter().try_for_each(Reader::finish)
}

fn write_squares(squares: &[Vec<ExactSum>]) -> Result<Vec<u8>> {
    let mut writer = Writer::default();
    squares.iter().flatten().try_for_each(|sum| writer.numbers(sum.totals()))?;
    Ok(writer.finish())
}

impl ShardedGroup {
    /// Commits the pushes that a ticket names, as [`Group::commit`] of this group alone.
    ///
    /// # Errors
    /// The same.
    pub fn commit(&mut self, binding: &Binding, ticket: &[f32], is_update: bool, pool: &Pool) -> Result<f64> {
        commit(&mut [self], std::slice::from_ref(binding), &[ticket], is_update, pool)
    }

    /// Updates the records of this rank's shard, as [`HostGroup::apply`](crate::host::group::HostGroup::apply).
    ///
    /// # Errors
    /// The same.
    pub fn apply(&mut self, binding: &Binding, scalars: &ApplyScalars, pool: &Pool) -> Result<()> {
        self.shard.apply(binding, scalars, pool)
    }

    fn resolve(&self, ticket: &[f32]) -> Result<Vec<Named>> {
        self.ring.resolve(ticket).map_err(|what| Error::Ticket { tables: self.names(), what })
    }

    /// Merges the named gradients that still are where the framework has them.
    fn merge_held(&mut self, named: &[Named], pool: &Pool) -> Result<()> {
        let start = self.shard.stopwatch.start();
        for named in named {
            let Some(push) = self.ring.get(named.number) else { continue };
            if let PushedGradients::Held { rows, .. } = &push.gradients {
                let sent = self.lookups.iter().find(|sent| sent.saved.number == push.lookup.number);
                let sent = sent.ok_or_else(|| gone_lookup(self))?;
                let merged = merge_sent(sent, rows, self.row_type, &mut self.spare, pool)?;
                if let Some(push) = self.ring.get_mut(named.number) {
                    push.gradients = PushedGradients::Merged(merged);
                }
            }
        }
        self.shard.stopwatch.stop(StepPart::Merge, start);
        Ok(())
    }

    /// Writes the gradients of the keys that a rank owns.
    fn write_pushes(&self, named: &[Named], to: usize, writer: &mut Writer) -> Result<()> {
        writer.number(named.len() as u64)?;
        for &Named { number, weight } in named {
            let Some(Push { lookup, gradients: PushedGradients::Merged(merged) }) = self.ring.get(number)
            else {
                continue;
            };
            writer.numbers(&[lookup.number, u64::from(weight.to_bits())])?;
            let sent = self.lookups.iter().find(|sent| sent.saved.number == lookup.number);
            let sent = sent.ok_or_else(|| gone_lookup(self))?;
            let of_tables = || sent.gradients_of_keys(to, merged);
            let of_bags = || sent.gradients_of_bags(to, merged);
            let num_floats: usize = of_tables().chain(of_bags()).map(<[f32]>::len).sum();
            // With a byte for the exchange.
            writer.reserve(8 * lookup.tables.len() + 4 * num_floats + 1)?;
            for (table, gradients) in lookup.tables.iter().zip(of_tables()) {
                writer.number((gradients.len() / table.dim) as u64)?;
                writer.rows(gradients)?;
            }
            of_bags().try_for_each(|gradients| writer.rows(gradients))?;
        }
        Ok(())
    }

    /// Reads the gradients of all ranks for this group. `named`: this rank's pushes.
    fn read_pushes(
        &mut self,
        named: &[Named],
        readers: &mut [Reader],
        pool: &Pool,
    ) -> Result<Vec<LookupGradients>> {
        let differs = |rank: usize| Error::Rank {
            rank,
            what: "applies the gradients of other lookups than this rank. All ranks must make the same calls"
                .into(),
        };
        for (from, reader) in readers.iter_mut().enumerate() {
            if reader.number()? != named.len() as u64 {
                return Err(differs(from));
            }
        }
        let ShardedGroup { ring, lookups: sent, spare, shard, .. } = self;
        let pushes = || named.iter().filter_map(|named| ring.get(named.number));
        let mut lookups: Vec<LookupGradients> =
            pushes().map(|push| LookupGradients::of(&push.lookup)).collect();
        for (from, reader) in readers.iter_mut().enumerate() {
            for (push, gradients) in pushes().zip(&mut lookups) {
                if reader.number()? != gradients.lookup {
                    return Err(differs(from));
                }
                gradients.weights.push(f32::from_bits(reader.number()? as u32));
                let sent = sent.iter().find(|sent| sent.saved.number == gradients.lookup);
                let pooled = &sent.ok_or_else(|| gone_lookup(shard))?.pooled[from];
                gradients.read(&push.lookup, pooled, spare, reader, pool)?;
            }
        }
        Ok(lookups)
    }

    /// Pushes the gradients of all ranks for a lookup.
    fn push_to_shard(&mut self, mut gradients: LookupGradients, pool: &Pool) -> Result<Named> {
        let weight = gradients.common_weight();
        let mut ticket = [0.0; TICKET_LEN];
        let LookupGradients { lookup, rows, .. } = gradients;
        let number = self.shard.push(lookup, OutputGradients::owned(rows), Vec::new(), &mut ticket, pool)?;
        Ok(Named { number, weight })
    }

    fn take_pushes(&mut self, prepared: &Prepared, pool: &Pool) -> Result<()> {
        let (taken, dropped) = self.ring.take(&prepared.named);
        self.shard.oldest_needed = self.oldest_needed();
        self.shard.take_named(&prepared.of_shard, pool)?;
        // The shard does not know the pushes that wait in this group's ring.
        self.ring.iter().for_each(|push| self.shard.reopen_lookup(push.lookup.number));
        let oldest = taken.iter().map(|(_, push)| push.lookup.number).min();
        taken.into_iter().map(|(_, push)| push).chain(dropped).for_each(|push| self.reuse(push));
        if let Some(oldest) = oldest {
            self.forget_lookups(oldest);
        }
        Ok(())
    }

    /// The squared gradients of the keys that this rank counts. Every rank has those of a replicated table; rank 0 counts them.
    fn own_squares(&mut self, pool: &Pool) -> Result<Vec<ExactSum>> {
        let mut squares = self.shard.squares(pool)?;
        for (sum, requests) in squares.iter_mut().zip(&self.requests) {
            if requests.owners.is_replicated() && requests.owners.rank > 0 {
                *sum = ExactSum::default();
            }
        }
        Ok(squares)
    }

    /// Stores the squared norm of each table over all ranks. Returns their sum.
    fn set_norms(&mut self, readers: &mut [Reader]) -> Result<f64> {
        let mut squares: Vec<ExactSum> = self.requests.iter().map(|_| ExactSum::default()).collect();
        for reader in readers {
            for sum in &mut squares {
                let mut totals = Vec::new();
                reader.numbers(sum.totals().len(), &mut totals)?;
                sum.add_totals(&totals);
            }
        }
        Ok(self.shard.set_norms(&squares))
    }
}
