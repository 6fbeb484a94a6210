//! The launches of a lookup.

#![allow(unsafe_code)]

use sok_core::contract::profile::StepPart;
use sok_core::error::{Error, Result};

use super::feature::array_type_of;
use super::given_scores::GivenScores;
use super::places::Places;
use super::sort_plan::{Scratch, SortPlan};
use super::{Bags, Feature, Saved, SavedFeature, Workspace};
use crate::abi::{self, *};
use crate::device::{Stream, launch_next};
use crate::gpu_table::GpuTable;
use crate::gpu_table::uses::UsedRecords;
use crate::kernels::{FORWARD, RANKS};
use crate::memory::{Buffer, words};

/// Where the rows of ids come from.
#[derive(Clone, Copy)]
pub enum RowSource<'a> {
    /// The records of the ids, which are looked up.
    Records,
    /// Other ranks. By table: the address of row 1. Ids have the numbers of their rows.
    Ranks(&'a [u64]),
    /// Records, for other ranks: these have numbered the rows of their ids.
    NumberedRecords,
}

/// How a lookup treats the ids of all its features.
#[derive(Clone, Copy)]
pub struct LookupOptions<'a> {
    /// By table: whether keys without a record get one.
    pub inserts: &'a [bool],
    /// By table: what becomes of ids without a record, bits `ABSENT_LATER` and `ABSENT_UNKNOWN`; may be empty. A table with `ABSENT_LATER`
    /// must have candidates.
    pub absent: &'a [u32],
    /// Whether gradients may come for it.
    pub save: bool,
    /// An address on the device, and the number of the lookup that is written there.
    pub number: Option<(u64, u64)>,
    /// Where the rows come from.
    pub rows: RowSource<'a>,
}

/// Descriptors and grids for the launches of a lookup.
struct Payload {
    /// Descriptors of the features; then the first block of each in `find_records`; then the first block of each in `make_rows`.
    words: Vec<u32>,
    find_blocks: usize,
    rows_blocks: usize,
    /// The instantiation of `make_rows`.
    bags: BagKind,
}

/// The places of the ids of a call.
struct Planned {
    sort: SortPlan,
    /// Those of the sort; then those of tables whose ids are not sorted.
    sections: Vec<Section>,
    /// By feature: the place of its first id.
    first_ids: Vec<usize>,
    /// By table of the group: as `Section::first_candidate`.
    first_candidates: Vec<u32>,
}

/// A lookup whose descriptors are on their way to the device.
pub struct Started {
    memory: Buffer<u32>,
    pub(super) places: Places,
    plan: Option<SortPlan>,
    scratch: Scratch,
    pub(super) call: Call,
    pub(super) found: Found,
    pub(super) find_blocks: usize,
    rows_blocks: usize,
    bags: BagKind,
    ids_by_kind: Vec<usize>,
    /// Whether the numbers of ids of the features are upper bounds, see [`Workspace::connect`].
    pub(super) is_bounded: bool,
    /// Address of the numbers by which ids are sorted, if these are not their records: those of ids that get gradients alone, those of the rows
    /// that another rank has numbered, or those of records and candidates.
    pub(super) active: Option<u64>,
    /// By table of the call: its section of the sort.
    pub(super) sections: Vec<Section>,
}

impl Started {
    /// The records of all ids of a table, as far as they were found or inserted.
    pub(crate) fn records_of(&self, table: usize) -> UsedRecords {
        let section = self.sections.iter().find(|section| section.table as usize == table);
        section.map_or(UsedRecords::NONE, |section| UsedRecords {
            address: self.found.records + 4 * u64::from(section.first),
            count: section.count as usize,
        })
    }

    /// Address of how many ids each id of a table stands for; 0 if each stands for itself.
    pub(crate) fn id_counts_of(&self, table: usize) -> u64 {
        let section = self.sections.iter().find(|section| section.table as usize == table);
        match (section, self.places.id_counts) {
            (Some(section), counts) if counts != 0 => counts + 4 * u64::from(section.first),
            _ => 0,
        }
    }

    /// Whether ids have coefficients of their own.
    pub fn has_coefficients(&self) -> bool {
        self.found.named != 0
    }
}

impl Workspace {
    /// Enqueues the lookup of all features of a call. Returns what `push` needs, if it is saved.
    ///
    /// If no feature has memory for rows, none are written. Coefficients of ids are then not computed either.
    ///
    /// # Errors
    /// [`Error::Argument`] if features, rows and ids are too many for one call. [`Error::Device`] without enough memory, or if a
    /// kernel cannot be compiled or launched.
    pub fn lookup(
        &mut self,
        tables: &mut [GpuTable],
        features: &[Feature],
        options: LookupOptions,
        stream: Stream,
    ) -> Result<Option<Saved>> {
        let started = self.start(tables, features, options, stream)?;
        self.find(&started, tables, options.inserts, stream)?;
        self.keep_id_counts(&started, features, None, stream)?;
        self.keep_scores(&started, None, stream)?;
        self.sort_ids(&started, stream)?;
        self.write_rows(&started, features, stream)?;
        Ok(self.end(started, tables, features))
    }

    /// Enqueues the descriptors of a lookup.
    ///
    /// # Errors
    /// As `lookup`.
    pub fn start(
        &mut self,
        tables: &mut [GpuTable],
        features: &[Feature],
        options: LookupOptions,
        stream: Stream,
    ) -> Result<Started> {
        let LookupOptions { inserts, absent, save, number, rows } = options;
        self.join(stream)?;
        self.describe(tables, stream)?;
        let mut ids_by_kind = vec![0; self.rows.len()];
        features.iter().for_each(|f| ids_by_kind[self.kinds[f.table]] += f.ids.len);
        let n: usize = ids_by_kind.iter().sum();
        let max_bags = features.iter().map(Feature::num_bags).max().unwrap_or(0);
        let shift = usize::BITS - max_bags.leading_zeros();
        if n > u32::MAX as usize / 4 || (features.len() as u64) << shift > 1 << 32 {
            return Err(Error::argument(format!(
                "{} features of {max_bags} rows with {n} ids are too many for one call",
                features.len()
            )));
        }
        let planned = self.plan(tables, features, absent, rows)?;
        let Payload { words: mut payload, find_blocks, rows_blocks, bags } =
            self.payload(tables, features, &planned, inserts, absent, rows);
        let Planned { sort, sections, first_candidates, .. } = planned;
        let plan = save.then_some(sort);
        let has_candidates = first_candidates.iter().any(|first| *first != 0);
        let num_words = self.places(0, features, &ids_by_kind, plan.as_ref(), has_candidates).words;
        let memory = self.take_memory(num_words)?;
        let places = self.places(memory.address(), features, &ids_by_kind, plan.as_ref(), has_candidates);
        if let Some(plan) = &plan {
            payload.extend_from_slice(words(&places.kinds));
            payload.extend_from_slice(words(&plan.sections));
        }
        self.deliver(places.features, &payload, (places.zeros, places.num_zeros), number, stream)?;

        let call = Call {
            tables: self.tables_on_device.address(),
            features: places.features,
            first_find: places.first_find,
            first_rows: places.first_rows,
            num_features: features.len() as u32,
            shift,
        };
        let ([records, values, overflow], scratch) = self.scratch(n, plan.as_ref())?;
        let found = Found {
            records,
            values: if save { values } else { 0 },
            named: places.named,
            zeros: scratch.counts,
            num_zeros: plan.as_ref().map_or(0, SortPlan::count_words) as u32,
            pad: 0,
            overflow: Overflow { count: places.overflow_count, ids: overflow },
            fault: self.fault.address(),
            numbers: places.candidates.numbers,
        };
        let active = has_candidates.then_some(places.candidates.numbers);
        Ok(Started {
            memory,
            places,
            plan,
            scratch,
            call,
            found,
            find_blocks,
            rows_blocks,
            bags,
            ids_by_kind,
            active,
            is_bounded: false,
            sections,
        })
    }

    /// Enqueues finding the records of all ids.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be compiled or launched.
    pub fn find(
        &self,
        started: &Started,
        tables: &[GpuTable],
        inserts: &[bool],
        stream: Stream,
    ) -> Result<()> {
        let (call, found, blocks) = (started.call, started.found, started.find_blocks);
        let [find, settle] = self.device.kernels(&FORWARD, ["find_records", "settle_records"])?;
        let measured = self.profiler.start(stream)?;
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace or caller keep the memory that they point to.
        unsafe { launch_next!(find, stream, blocks, FIND_THREADS, call, found) }?;
        if inserts.contains(&true) || found.numbers != 0 {
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace or caller keep the memory that they point
            // to.
            unsafe {
                launch_next!(settle, stream, 8 * self.device.multiprocessors, FIND_THREADS, call, found)
            }?;
        }
        self.find_out_of_vocabulary(tables, stream)?;
        self.profiler.stop(StepPart::Find, measured, stream)
    }

    /// Enqueues finding the records of the out-of-vocabulary keys.
    ///
    /// # Errors
    /// As `find`.
    pub fn find_out_of_vocabulary(&self, tables: &[GpuTable], stream: Stream) -> Result<()> {
        if tables.iter().all(|table| table.config.out_of_vocabulary_key.is_none()) {
            return Ok(());
        }
        let find = self.device.kernel(&FORWARD, "find_out_of_vocabulary")?;
        let (at, blocks, n) = (self.tables(), tables.len().div_ceil(FIND_THREADS), tables.len() as u32);
        // SAFETY: The arguments have the types of the kernel's parameters. The workspace keeps the memory that they point to.
        unsafe { launch_next!(find, stream, blocks, FIND_THREADS, at, n) }
    }

    /// Enqueues finding the records of the ids of silent features.
    ///
    /// # Errors
    /// As `find`.
    pub fn find_silent(&self, started: &Started, stream: Stream) -> Result<()> {
        let (call, found, blocks) = (started.call, started.found, started.find_blocks);
        let find = self.device.kernel(&RANKS, "find_silent")?;
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace or caller keep the memory that they point to.
        unsafe { launch_next!(find, stream, blocks, FIND_THREADS, call, found) }
    }

    /// Enqueues sorting the ids by their records, if the lookup is saved.
    ///
    /// # Errors
    /// As `find`.
    pub fn sort_ids(&self, started: &Started, stream: Stream) -> Result<()> {
        let Started { places, plan, scratch, found, .. } = started;
        match plan {
            Some(plan) if !plan.sections.is_empty() => {
                let records = started.active.unwrap_or(found.records);
                self.sort_beside(plan, places, [records, found.values], *scratch, stream)
            }
            _ => Ok(()),
        }
    }

    /// Enqueues writing the rows of all features that have memory for them.
    ///
    /// # Errors
    /// As `find`.
    pub fn write_rows(&self, started: &Started, features: &[Feature], stream: Stream) -> Result<()> {
        if features.iter().all(|f| f.rows == 0) {
            return Ok(());
        }
        let Started { places, call, found, rows_blocks, bags, .. } = started;
        let make_rows = self.kernels_by_kinds(&FORWARD, array_type_of(features), |rows| {
            format!("make_rows<{}, {rows}>", *bags as u32)
        })?;
        let rows = Rows {
            records: found.records,
            named: places.named,
            kept: places.kept,
            fault: self.fault.address(),
        };
        let (call, blocks) = (*call, *rows_blocks);
        let measured = self.profiler.start(stream)?;
        for (make_rows, kinds) in make_rows {
            let kinds = self.kinds_of_launch(&kinds);
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace or caller keep the memory that they point
            // to.
            unsafe { launch_next!(make_rows, stream, blocks, ROWS_THREADS, call, rows, kinds) }?;
        }
        self.profiler.stop(StepPart::Pool, measured, stream)
    }

    /// Takes back the memory of a lookup that is not made.
    pub fn forget(&mut self, started: Started) {
        self.give_back(started.memory);
    }

    /// Ends a lookup. Returns what `push` needs, if it is saved.
    pub fn end(&mut self, started: Started, tables: &[GpuTable], features: &[Feature]) -> Option<Saved> {
        let Started { memory, places, plan, call, find_blocks, rows_blocks, ids_by_kind, .. } = started;
        let (is_bounded, sections) = (started.is_bounded, started.sections);
        if plan.is_none() {
            self.give_back(memory);
            return None;
        }
        let mut taking_part: Vec<usize> = features.iter().map(|f| f.table).collect();
        taking_part.sort_unstable();
        taking_part.dedup();
        let feature = |f: &Feature| SavedFeature {
            table: f.table,
            num_bags: f.num_bags(),
            num_ids: f.ids.len,
            dim: tables[f.table].config.dim,
            at_owner: f.at_owner,
            scale: f.scale(),
        };
        Some(Saved {
            memory,
            sides: places.sides,
            sorted: places.sorted,
            sections: (places.sections, sections),
            named: places.named,
            kept: places.kept,
            id_counts: places.id_counts,
            given: GivenScores { address: places.given_scores, blocks: find_blocks },
            candidates: places.candidates,
            keys: places.keys,
            entries: 0,
            call,
            rows_blocks,
            ids_by_kind,
            shift: call.shift,
            source: if places.named == 0 { Source::Rows } else { Source::WeightedRows },
            array_type: array_type_of(features),
            is_bounded,
            again: features.iter().any(|f| !matches!(f.bags, Bags::Each | Bags::Fixed { hotness: 1, .. })),
            features: features.iter().map(feature).collect(),
            generations: taking_part.iter().map(|&t| (t, tables[t].generation)).collect(),
            kinds: places.kinds,
        })
    }

    /// Returns the descriptors of the features, and the grids.
    fn payload(
        &self,
        tables: &[GpuTable],
        features: &[Feature],
        planned: &Planned,
        inserts: &[bool],
        absent: &[u32],
        rows: RowSource,
    ) -> Payload {
        let (mut descriptors, mut first_find, mut first_rows) = (Vec::new(), Vec::new(), Vec::new());
        let (mut find_blocks, mut rows_blocks, mut first_split, mut bags) = (0, 0, 0, BagKind::Each);
        for (feature, first_id) in features.iter().zip(&planned.first_ids) {
            let table = &tables[feature.table];
            let (splits, wide, hotness) = match feature.bags {
                Bags::Each => (0, false, 1),
                Bags::Fixed { hotness, .. } => (0, false, hotness),
                Bags::Ragged { splits, wide, .. } => (splits, wide, 0),
            };
            let is_static = table.config.vocabulary_size.is_some();
            let has_roles = is_static || feature.weights.is_some() || feature.padding_key.is_some();
            // Without weights, a bag of one id has the same row with every combiner.
            let is_gather = hotness == 1 && feature.weights.is_none();
            let may_miss = has_roles || !inserts[feature.table];
            bags = bags.max(match (is_gather, may_miss) {
                (true, _) => BagKind::Each,
                (false, false) => BagKind::Summed,
                (false, true) => BagKind::Any,
            });
            let num_bags = feature.num_bags();
            let quads = quads(table.config.dim);
            let (records, stride) = match rows {
                RowSource::Ranks(rows) => (rows[feature.table] - 16 * quads as u64, quads),
                _ => (table.descriptor(0).records, table.layout.stride),
            };
            descriptors.push(abi::Feature {
                ids: feature.ids.address,
                high: feature.ids.high,
                splits,
                weights: feature.weights.unwrap_or(0),
                rows: if feature.at_owner { 0 } else { feature.rows },
                records,
                padding_key: feature.padding_key.unwrap_or(0),
                scores: feature.scores.map_or(0, |scores| scores.address),
                stride: stride as u32,
                table: feature.table as u32,
                kind: self.kinds[feature.table] as u32,
                num_ids: feature.ids.len as u32,
                num_bags: num_bags as u32,
                hotness: hotness as u32,
                key_type: feature.ids.key_type as u32,
                combiner: feature.combiner as u32,
                has_padding: u32::from(feature.padding_key.is_some()),
                wide_splits: u32::from(wide),
                has_roles: u32::from(has_roles),
                inserts: u32::from(inserts[feature.table]),
                refuses: u32::from(table.refuses()),
                is_gather: u32::from(is_gather),
                pools: u32::from(!matches!(feature.bags, Bags::Each)),
                scale: feature.scale(),
                first_id: *first_id as u32,
                first_split: first_split as u32,
                is_silent: feature.is_silent.into(),
                absent: absent.get(feature.table).copied().unwrap_or_default(),
                first_candidate: planned.first_candidates[feature.table],
                score_type: feature.scores.map_or(0, |scores| scores.score_type as u32),
            });
            first_split += feature.num_kept_splits();
            first_find.push(find_blocks as u32);
            first_rows.push(rows_blocks as u32);
            find_blocks += feature.ids.len.div_ceil(FIND_THREADS);
            let groups = ROWS_THREADS / lanes(table.config.dim);
            rows_blocks += num_bags.div_ceil(if is_gather { ROWS_THREADS } else { groups });
        }
        let mut words = words(&descriptors).to_vec();
        words.extend(first_find);
        words.extend(first_rows);
        Payload { words, find_blocks, rows_blocks, bags }
    }

    /// Returns where the ids of a call have their places, by table in order, and their sort.
    fn plan(
        &self,
        tables: &[GpuTable],
        features: &[Feature],
        absent: &[u32],
        rows: RowSource,
    ) -> Result<Planned> {
        let (mut ids, mut at_owner) = (vec![0; tables.len()], vec![false; tables.len()]);
        for feature in features.iter().filter(|feature| !feature.is_silent) {
            ids[feature.table] += feature.ids.len;
            at_owner[feature.table] |= feature.at_owner;
        }
        let mut next = vec![0; tables.len()];
        let mut first_candidates = vec![0; tables.len()];
        let (mut at, mut max_records, mut likely_records) = (0, 0, 0);
        let mut sections = [Vec::new(), Vec::new()];
        // Ids that are not sorted come after the others.
        for (place, is_sorted) in [true, false].into_iter().enumerate() {
            for t in (0..tables.len()).filter(|&t| ids[t] > 0 && at_owner[t] != is_sorted) {
                next[t] = at;
                let (mut most, mut likely) = match rows {
                    RowSource::Records => (tables[t].max_numbers(), tables[t].known_numbers()),
                    _ => (ids[t] as u64 + 1, ids[t] as u64 + 1),
                };
                let becomes_candidates = absent.get(t).is_some_and(|bits| bits & ABSENT_LATER != 0);
                if let (true, Some(candidates)) = (becomes_candidates, &tables[t].candidates) {
                    let (all, known) = candidates.max_numbers();
                    // A table without memory has no record 0 either.
                    let first = most.max(1);
                    (first_candidates[t], most, likely) = (first as u32, first + all, first + known);
                }
                if most > u64::from(u32::MAX) {
                    return Err(Error::Device(format!(
                        "table `{}`: rows and keys without a row are more than {} on a GPU",
                        tables[t].config.name,
                        u32::MAX
                    )));
                }
                max_records = max_records.max(most);
                likely_records = likely_records.max(likely);
                sections[place].push(Section {
                    first: at as u32,
                    count: ids[t] as u32,
                    kind: self.kinds[t] as u32,
                    // The lookup of the keys has counted the distinct ones.
                    table: if matches!(rows, RowSource::NumberedRecords) { NO_TABLE } else { t as u32 },
                    first_candidate: first_candidates[t],
                    ..Section::default()
                });
                at += ids[t];
            }
        }
        let mut after = at;
        let place = |f: &Feature| {
            let next = if f.is_silent { &mut after } else { &mut next[f.table] };
            *next += f.ids.len;
            *next - f.ids.len
        };
        let first_ids = features.iter().map(place).collect();
        let [sorted, others] = sections;
        let sort = self.sort_plan(sorted, max_records, likely_records);
        let sections = [&sort.sections[..], &others].concat();
        Ok(Planned { sort, sections, first_ids, first_candidates })
    }

    pub(super) fn sort_plan(
        &self,
        sections: Vec<Section>,
        max_records: u64,
        likely_records: u64,
    ) -> SortPlan {
        let multiprocessors = self.device.multiprocessors as usize;
        SortPlan::new(sections, max_records, likely_records, multiprocessors, self.device.shared_bytes)
    }

    /// Address of the record numbers that the last lookup found, u32 by place of an id. Valid until the next lookup.
    pub fn found_records(&self) -> u64 {
        self.scratch.as_ref().map_or(0, Buffer::address)
    }

    /// Returns, for each feature, the place of its first id in the call.
    ///
    /// # Errors
    /// As `start`.
    pub fn first_ids(&self, tables: &[GpuTable], features: &[Feature]) -> Result<Vec<usize>> {
        Ok(self.plan(tables, features, &[], RowSource::Records)?.first_ids)
    }

    /// Sorts ids by their records and lists the distinct ones, on the second stream, after the work that is on `stream` so far.
    fn sort_beside(
        &self,
        plan: &SortPlan,
        places: &Places,
        ids: [u64; 2],
        scratch: Scratch,
        stream: Stream,
    ) -> Result<()> {
        let side = Stream::of_cudarc(&self.side);
        stream.record(&self.fork)?;
        side.wait(&self.fork)?;
        let started = self.profiler.start(side)?;
        self.sort(plan, places, ids, scratch, side)?;
        side.record(&self.join)?;
        self.is_forked.set(true);
        self.profiler.stop(StepPart::Sort, started, side)
    }
}
