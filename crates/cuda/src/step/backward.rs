//! The launches of push, commit and apply.

#![allow(unsafe_code)]

use std::ops::Range;

use sok_core::contract::profile::StepPart;
use sok_core::error::{Error, Result};
use sok_core::formula::update::Update;
use sok_core::row_type::RowType;

use super::given_scores::GivenScores;
use super::places::CandidatePlaces;
use super::sort_plan::SortPlan;
use super::{Saved, SavedFeature, Workspace};
use crate::abi::*;
use crate::delivery;
use crate::device::{Stream, driver_error, launch, launch_next};
use crate::gpu_table::GpuTable;
use crate::gpu_table::record::RowKind;
use crate::kernels::{BACKWARD, CONTROL, WEIGHTS};
use crate::memory::{Buffer, words};
use crate::rule;

/// Number of blocks of `update_in_turns` for each multiprocessor: several rounds of those that run at the same time.
const UPDATE_BLOCKS: usize = 48;

/// Maximum number of gradient arrays in the parameters of a launch of `check_finite`.
const CHECKED: usize = 240;

/// Divides gradients, numbers of so many bytes, into pieces of similar sizes. There are at most `CHECKED / 2` more pieces than gradients.
fn pieces(gradients: &[Gradients], num_bytes: usize) -> Vec<Gradients> {
    let total: u64 = gradients.iter().map(|g| g.count).sum();
    let size = total.div_ceil(CHECKED as u64 / 2).max(1 << 14);
    let pieces_of = |g: &Gradients| {
        let Gradients { from, count } = *g;
        (0..count.div_ceil(size)).map(move |i| {
            let start = i * size;
            Gradients { from: from + num_bytes as u64 * start, count: size.min(count - start) }
        })
    };
    gradients.iter().flat_map(pieces_of).collect()
}

/// What updates the tables of an optimizer in a step.
pub struct By<'a> {
    /// Number of the optimizer.
    pub optimizer: usize,
    /// What it does.
    pub update: &'a Update,
    /// Address of its `Prepared` of the step.
    pub prepared: u64,
    /// Address of a factor for each table, which clips gradients by the norm of the table; or 0.
    pub factors: u64,
}

impl Workspace {
    /// Returns the `Side` of each feature: the addresses of its gradients and its records. If a table has lost its records since
    /// the lookup, all its record numbers lead to `nowhere`, an address with memory for one record.
    pub fn sides(&self, tables: &[GpuTable], saved: &Saved, gradients: &[u64], nowhere: u64) -> Vec<Side> {
        let is_gone =
            |t: usize| saved.generations.iter().any(|&(table, g)| table == t && tables[t].generation != g);
        let side = |(f, gradients): (&SavedFeature, &u64)| {
            let table = &tables[f.table];
            let (records, stride) = match is_gone(f.table) {
                true => (nowhere, 0),
                false => (table.descriptor(0).records, table.layout.stride as u32),
            };
            Side { gradients: *gradients, records, stride, table: f.table as u32, scale: f.scale, pad: 0 }
        };
        saved.features.iter().zip(gradients).map(side).collect()
    }

    /// Enqueues writing the sides of a push to the device.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    pub fn deliver_sides(&self, saved: &Saved, sides: &[Side], stream: Stream) -> Result<()> {
        self.deliver(saved.sides, words(sides), (0, 0), None, stream)
    }

    /// Enqueues writing the ticket of a push, and its addresses to the device: `sides`; `copied`, the gradients that
    /// `copy_gradients` must copy to the sides; `products`, by feature the addresses that take the gradients of weights. The last
    /// two may be empty.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    pub fn write_ticket(
        &self,
        saved: &Saved,
        sides: &[Side],
        copied: &[Gradients],
        products: &[u64],
        ticket: &NewTicket,
        stream: Stream,
    ) -> Result<()> {
        let values = [words(sides), words(copied), words(products)].concat();
        let room = delivery::at_once(&self.device, values.len());
        let now = values.len().min(room);
        if now < values.len() {
            self.deliver(saved.sides + 4 * now as u64, &values[now..], (0, 0), None, stream)?;
        }
        let mut payload = vec![0u32; room];
        payload[..now].copy_from_slice(&values[..now]);
        let delivery = Delivery { to: saved.sides, count: now as u32, ..Delivery::default() };
        let write = self.device.kernel(&CONTROL, &format!("write_ticket<{room}>"))?;
        let ticket = *ticket;
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
        unsafe { launch_next!(write, stream, 1, 1024, ticket, delivery, payload[0]) }
    }

    /// Enqueues copying the gradients, from `copied` to `sides` as given to `write_ticket`.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    pub fn copy_gradients(&self, saved: &Saved, stream: Stream) -> Result<()> {
        let copy =
            self.device.kernel(&BACKWARD, &format!("copy_gradients<{}>", saved.array_type.num_bytes()))?;
        if saved.features.is_empty() {
            return Ok(());
        }
        let (sides, count) = (saved.sides, saved.features.len() as u32);
        let blocks = (8 * self.device.multiprocessors as usize).next_multiple_of(saved.features.len());
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
        unsafe { launch_next!(copy, stream, blocks, UPDATE_THREADS, sides, count) }
    }

    /// Enqueues a check that sets `is_bad` if a gradient, a number of this type, is not finite.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    pub fn check_finite(
        &self,
        gradients: &[Gradients],
        array_type: RowType,
        is_bad: &Buffer<u32>,
        stream: Stream,
    ) -> Result<()> {
        let name = format!("check_finite<{CHECKED}, {}>", array_type as u32);
        let check = self.device.kernel(&CONTROL, &name)?;
        let is_bad = is_bad.address();
        for some in pieces(gradients, array_type.num_bytes()).chunks(CHECKED) {
            let mut list = [Gradients::default(); CHECKED];
            list[..some.len()].copy_from_slice(some);
            let count = some.len() as u32;
            let blocks = (8 * self.device.multiprocessors as usize).next_multiple_of(some.len());
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
            unsafe { launch_next!(check, stream, blocks, 256, list, count, is_bad) }?;
        }
        Ok(())
    }

    /// Enqueues computing the gradients of the weights of all features, to `products` as given to `write_ticket`. `copied`: the
    /// length of `copied` there.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    pub fn weight_gradients(&self, saved: &Saved, copied: usize, stream: Stream) -> Result<()> {
        let kernels =
            self.kernels_by_kinds(&WEIGHTS, saved.array_type, |rows| format!("weight_gradients<{rows}>"))?;
        let (call, kept, sides) = (saved.call, saved.kept, saved.sides);
        let before = saved.features.len() * size_of::<Side>() + copied * size_of::<Gradients>();
        let products = sides + before as u64;
        for (kernel, kinds) in kernels {
            let (blocks, kinds) = (saved.rows_blocks, self.kinds_of_launch(&kinds));
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
            unsafe {
                launch_next!(kernel, stream, blocks, ROWS_THREADS, call, kept, sides, products, kinds)
            }?;
        }
        Ok(())
    }

    /// Returns a number of blocks that suffices for all keys of some kinds. Only the device knows the keys, so the number follows from
    /// the number of ids: a run, or a key of several ids, takes no more of a block than as many keys of one id.
    fn blocks(&self, saved: &Saved, kinds: Range<usize>, keys_of_a_group: usize) -> usize {
        let blocks = |(ids, row): (&usize, &RowKind)| {
            ids.div_ceil(UPDATE_THREADS / lanes(row.dim) * keys_of_a_group) + 3
        };
        saved.ids_by_kind[kinds.clone()].iter().zip(&self.rows[kinds]).map(blocks).sum()
    }

    /// Returns half as many blocks, for kernels whose blocks take turns. If ids repeat, most blocks have nothing to do; if they do
    /// not, each block takes two turns.
    pub(super) fn blocks_in_turns(
        &self,
        saved: &Saved,
        kinds: Range<usize>,
        keys_of_a_group: usize,
    ) -> usize {
        self.blocks(saved, kinds, keys_of_a_group).div_ceil(2)
    }

    /// Enqueues merging a push's gradients into `sums`, an address with memory as `take_sums` returns it. `None`: the sum of a key goes
    /// where its record would be, by the sides of the push.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    pub fn merge(&self, saved: &Saved, sums: Option<u64>, stream: Stream) -> Result<()> {
        self.join(stream)?;
        let name = |rows: &str| format!("merge<{}, {}, {rows}>", saved.source as u32, saved.again);
        let kernels = self.kernels_by_kinds(&BACKWARD, saved.array_type, name)?;
        let started = self.profiler.start(stream)?;
        for (merge, kinds) in kernels {
            let mut work = saved.work(self, kinds.clone(), 0, 0, sums.unwrap_or(0));
            work[word_of!(WorkHead, is_placed)] = sums.is_none().into();
            let blocks = self.blocks_in_turns(saved, kinds, PER_SINGLE);
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
            unsafe { launch_next!(merge, stream, blocks, UPDATE_THREADS, work[0]) }?;
        }
        self.profiler.stop(StepPart::Merge, started, stream)
    }

    /// Enqueues merging a push's gradients and updating their records, in the tables of one optimizer.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    pub fn update(&self, saved: &Saved, by: &By, stream: Stream) -> Result<()> {
        self.join(stream)?;
        let rule = rule::type_name(&by.update.rule);
        let kernel = if saved.is_bounded { "update_in_turns" } else { "update" };
        let name = |rows: &str| format!("{kernel}<{}, {rule}, {}, {rows}>", saved.source as u32, saved.again);
        let kernels =
            self.kernels_of_kinds(self.kinds_of(by.optimizer), &BACKWARD, saved.array_type, name)?;
        let started = self.profiler.start(stream)?;
        for (kernel, kinds) in kernels {
            let work = saved.work(self, kinds.clone(), by.prepared, 0, 0);
            let mut blocks = self.blocks(saved, kinds, PER_SINGLE);
            if saved.is_bounded {
                blocks = blocks.min(UPDATE_BLOCKS * self.device.multiprocessors as usize);
            }
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
            unsafe { launch_next!(kernel, stream, blocks, UPDATE_THREADS, work[0]) }?;
        }
        self.profiler.stop(StepPart::Update, started, stream)
    }

    /// Enqueues updating records with gradients that `merge` has merged into `sums`, in the tables of one optimizer.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    pub fn update_sums(&self, saved: &Saved, by: &By, sums: u64, stream: Stream) -> Result<()> {
        let rule = rule::type_name(&by.update.rule);
        let name = |rows: &str| format!("update_sums<{}, {rule}, {rows}>", saved.source as u32);
        let kernels =
            self.kernels_of_kinds(self.kinds_of(by.optimizer), &BACKWARD, saved.array_type, name)?;
        let started = self.profiler.start(stream)?;
        for (kernel, kinds) in kernels {
            let work = saved.work(self, kinds.clone(), by.prepared, by.factors, sums);
            let blocks = self.blocks_in_turns(saved, kinds, PER_SUM);
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
            unsafe { launch_next!(kernel, stream, blocks, UPDATE_THREADS, work[0]) }?;
        }
        self.profiler.stop(StepPart::Update, started, stream)
    }

    /// Enqueues writing the fields of `Prepared` that a norm needs, before the scalars of the step are known. `row`: as
    /// `Preparation::row`.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    pub fn prepare_weight(&self, resolved: u64, row: u32, prepared: u64, stream: Stream) -> Result<()> {
        let prepare = self.device.kernel(&CONTROL, "prepare_weight")?;
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
        unsafe { launch!(prepare, stream, 1, 1, resolved, row, prepared) }
    }

    /// Enqueues adding the squares of merged gradients by table and exponent. `totals`: `(tables, 256)`, and for each table a
    /// number that `finish_norms` writes.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    pub fn sum_squares(
        &self,
        saved: &Saved,
        sums: u64,
        prepared: u64,
        totals: &Buffer<u64>,
        stream: Stream,
    ) -> Result<()> {
        totals.zero(stream)?;
        let totals = totals.address();
        let name = |rows: &str| format!("sum_squares<{}, {rows}>", saved.source as u32);
        for (kernel, kinds) in self.kernels_by_kinds(&BACKWARD, saved.array_type, name)? {
            let work = saved.work(self, kinds, prepared, 0, sums);
            let blocks = 8 * self.device.multiprocessors;
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
            unsafe { launch!(kernel, stream, blocks, UPDATE_THREADS, work[0], totals) }?;
        }
        Ok(())
    }

    /// Enqueues computing the squared norm of each table from `totals`, and adding them to `total`, the address of a float64.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    pub fn finish_norms(
        &self,
        totals: &Buffer<u64>,
        norms: &Buffer<f32>,
        total: u64,
        stream: Stream,
    ) -> Result<()> {
        let finish = self.device.kernel(&CONTROL, "finish_norms")?;
        let (totals, num_tables, norms) = (totals.address(), norms.len() as u32, norms.address());
        let tables = self.tables();
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
        unsafe { launch!(finish, stream, 1, 256, totals, tables, num_tables, norms, total) }
    }

    /// Enqueues computing the factors that clip the gradients of each table by the table's own norm. `norms`: the squared norms.
    /// `scalars`: address of the scalars of the step. `factors`: address that takes a float32 for each table.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    pub fn clip_factors(
        &self,
        norms: &Buffer<f32>,
        scalars: u64,
        clipnorm: f32,
        factors: u64,
        stream: Stream,
    ) -> Result<()> {
        let clip = self.device.kernel(&CONTROL, "clip_factors")?;
        let (num_tables, norms) = (norms.len() as u32, norms.address());
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
        unsafe { launch!(clip, stream, 1, 256, norms, num_tables, scalars, clipnorm, factors) }
    }

    /// Returns whether all work of the calls so far has completed.
    ///
    /// # Errors
    /// [`Error::Device`] if a launch has failed.
    pub fn is_idle(&self) -> Result<bool> {
        self.device.context.bind_to_thread().map_err(driver_error("using the GPU"))?;
        Ok(self.last.map_or(Ok(true), Stream::is_idle)? && Stream::of_cudarc(&self.side).is_idle()?)
    }

    /// Returns the number of merged keys by dim. The device must be idle.
    fn num_keys(&self, saved: &Saved) -> Result<Vec<usize>> {
        let count = |keys: &Keys| {
            let counts = crate::memory::read::<u32>(&self.device.context, keys.lists, LISTS_WORDS)?;
            Ok((counts[0] + counts[1] + counts[33]) as usize)
        };
        saved.kinds.iter().map(count).collect()
    }

    /// Numbers the records of all tables of a dim one table after the other. Returns, by table, the number of its record 0, and a
    /// number above all record numbers.
    fn number_by_dim(&self, tables: &[GpuTable]) -> Result<(Vec<u32>, u64)> {
        let (mut firsts, mut ends) = (vec![0; tables.len()], vec![0u64; self.rows.len()]);
        for t in 0..tables.len() {
            let end = &mut ends[self.kinds[t]];
            firsts[t] = *end as u32;
            *end += tables[t].num_numbers();
        }
        let most = ends.into_iter().max().unwrap_or(0);
        if most >= u64::from(u32::MAX) {
            return Err(Error::Device(format!(
                "gradients of several lookups of a step can be added up for at most {} records of a dim on a GPU. Received: {most}",
                u32::MAX - 1
            )));
        }
        Ok((firsts, most))
    }

    /// Returns the sort of merged gradients. A section has the gradients of all tables of a dim.
    fn plan_of_kinds(&self, ids_by_kind: &[usize], max_records: u64) -> SortPlan {
        let section = |(kind, ids): (usize, &usize)| Section {
            count: *ids as u32,
            kind: kind as u32,
            table: NO_TABLE,
            ..Section::default()
        };
        self.sort_plan(ids_by_kind.iter().enumerate().map(section).collect(), max_records, max_records)
    }

    /// Combines several merged pushes, each with its weight and the address of its sums, into one that has one sum for each record.
    /// Adds them in their order. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Device`] if tables of a dim have too many records, if there is not enough memory, or if a launch has failed.
    pub fn combine(
        &mut self,
        tables: &[GpuTable],
        merged: &[(f32, &Saved, u64)],
        stream: Stream,
    ) -> Result<(Saved, Buffer<u32>)> {
        self.device.synchronize()?;
        let counts = merged.iter().map(|(_, saved, _)| self.num_keys(saved)).collect::<Result<Vec<_>>>()?;
        let ids_by_kind: Vec<usize> =
            (0..self.rows.len()).map(|k| counts.iter().map(|c| c[k]).sum()).collect();
        let n: usize = ids_by_kind.iter().sum();
        let entry_words = n * size_of::<Entry>() / 4;
        let (firsts, max_records) = self.number_by_dim(tables)?;
        let plan = self.plan_of_kinds(&ids_by_kind, max_records);
        let num_words = self.places(0, &[], &ids_by_kind, Some(&plan), false).words;
        let memory = self.take_memory(num_words + entry_words + 64)?;
        let places = self.places(memory.address(), &[], &ids_by_kind, Some(&plan), false);
        let entries = memory.at(num_words.next_multiple_of(32));
        let ([records, unsorted, _], scratch) = self.scratch(n.max(1), Some(&plan))?;
        let (zeros, no_counts) = ((places.zeros, places.num_zeros), (scratch.counts, plan.count_words()));
        self.deliver(places.keys, words(&places.kinds), zeros, None, stream)?;
        self.deliver(places.sections, words(&plan.sections), no_counts, None, stream)?;
        // Index of the next entry of each dim.
        let mut next: Vec<usize> =
            ids_by_kind.iter().scan(0, |at, ids| Some(std::mem::replace(at, *at + ids))).collect();
        let mut numbered = Vec::new();
        for ((weight, saved, sums), counts) in merged.iter().zip(&counts) {
            let is_gone = |t: usize| {
                saved.generations.iter().any(|&(table, g)| table == t && tables[t].generation != g)
            };
            let by_table: Vec<u32> =
                (0..tables.len()).map(|t| if is_gone(t) { GONE } else { firsts[t] }).collect();
            let by_table = Buffer::from_slice(&self.device.context, &by_table)?;
            let all_kinds = 0..self.rows.len();
            let rows = self.row_list(all_kinds.clone(), RowType::Float32);
            let list =
                self.device.kernel(&BACKWARD, &format!("list_entries<{}, {rows}>", saved.source as u32))?;
            for (kind, &count) in counts.iter().enumerate() {
                let work = saved.work(self, all_kinds.clone(), 0, 0, *sums);
                let (number, how) = (
                    kind as u32,
                    Renumbering { firsts: by_table.address(), weight: *weight, first: next[kind] as u32 },
                );
                let blocks = count.div_ceil(UPDATE_THREADS);
                // SAFETY: The arguments have the types of the kernel's parameters. Workspace, lookup or caller keep their memory.
                unsafe {
                    launch!(
                        list,
                        stream,
                        blocks,
                        UPDATE_THREADS,
                        work[0],
                        number,
                        how,
                        entries,
                        records,
                        unsorted
                    )
                }?;
                next[kind] += count;
            }
            numbered.push(by_table);
        }
        if n > 0 {
            self.sort(&plan, &places, [records, unsorted], scratch, stream)?;
        }
        let generations = tables.iter().map(|table| table.generation).enumerate().collect();
        let saved = Saved {
            memory,
            sides: 0,
            sorted: places.sorted,
            sections: (places.sections, Vec::new()),
            named: 0,
            kept: Kept::default(),
            id_counts: 0,
            given: GivenScores { address: 0, blocks: 0 },
            candidates: CandidatePlaces::default(),
            keys: places.keys,
            entries,
            call: Call::default(),
            rows_blocks: 0,
            kinds: places.kinds,
            ids_by_kind,
            shift: 0,
            source: Source::Sums,
            array_type: RowType::Float32,
            is_bounded: false,
            again: false,
            features: Vec::new(),
            generations,
        };
        let sums = self.take_sums(&saved)?;
        self.merge(&saved, Some(sums.address()), stream)?;
        self.device.synchronize()?;
        Ok((saved, sums))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_gradients_are_all_of_them_and_alike() {
        let gradients = [(1 << 40, 9_000_000), (64, 100), (128, 0)];
        let gradients = gradients.map(|(from, count)| Gradients { from, count });
        let pieces = pieces(&gradients, 4);
        assert!(pieces.len() <= CHECKED && pieces.iter().all(|p| p.count <= 80_000));
        let mut next = 1 << 40;
        for piece in &pieces[..pieces.len() - 1] {
            assert_eq!(piece.from, next);
            next += 4 * piece.count;
        }
        assert_eq!(next, (1 << 40) + 4 * 9_000_000);
        assert_eq!(pieces[pieces.len() - 1], gradients[1]);
    }
}
