//! The steps that rows have missed: under an update mode other than local, rows without a gradient take each step with a gradient of zero.

use crate::contract::binding::UpdateMode;
use crate::error::Result;
use crate::formula::update::{Conditioning, Update, UpdateScalars};
use crate::formula::{Step, StepVisitor};
use crate::host::update::update_record;
use crate::memory;
use crate::row_type::RowType;
use crate::simd::{Kernel, dispatch, prefetch};
use crate::store::arena::{NO_RECORD, RecordNumber, SharedArena};
use crate::store::format::{Chance, RecordFormat};
use crate::store::region::Region;

/// Number of steps that are kept. When there are so many, all rows catch up.
pub const MOST: usize = 1024;

/// How many records are prefetched ahead.
const AHEAD: usize = 4;

/// The steps that rows of a table have missed.
pub struct MissedSteps {
    pub mode: UpdateMode,
    /// By record: the number of optimizer steps that the record has taken.
    pub taken: Region<u32>,
    /// Number of steps that all records have taken.
    pub before: u32,
    /// The steps after those.
    pub steps: Vec<UpdateScalars>,
}

impl MissedSteps {
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn new(mode: UpdateMode, next: RecordNumber) -> Result<MissedSteps> {
        let steps = memory::with_capacity(MOST, "the steps that rows miss")?;
        Ok(MissedSteps { mode, taken: Region::new(next as usize)?, before: 0, steps })
    }

    /// Number of steps so far.
    pub fn now(&self) -> u32 {
        self.before + self.steps.len() as u32
    }

    pub fn num_bytes(&self) -> usize {
        self.taken.num_bytes() + self.steps.capacity() * size_of::<UpdateScalars>()
    }

    /// Adds new rows, which have missed no step. `next`: a number above those of all records.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn start(&mut self, next: RecordNumber, records: impl Iterator<Item = RecordNumber>) -> Result<()> {
        self.taken.grow_amortized(next as usize)?;
        let now = self.now();
        records.for_each(|record| self.taken[record as usize] = now);
        Ok(())
    }

    /// Begins a step, which rows with these records take.
    pub fn begin<'a>(&mut self, scalars: UpdateScalars, records: impl Iterator<Item = &'a RecordNumber>) {
        self.steps.push(scalars);
        let now = self.now();
        records.filter(|&&record| record != NO_RECORD).for_each(|&record| self.taken[record as usize] = now);
    }
}

/// Lets records take the steps that they have missed.
pub struct CatchUp<'a> {
    pub arena: SharedArena<'a>,
    pub format: RecordFormat,
    pub seed: u64,
    pub update: &'a Update,
    pub steps: &'a [UpdateScalars],
    /// As in `MissedSteps`.
    pub before: u32,
    /// Number of steps taken, from the record with number `first` on.
    pub taken: &'a mut [u32],
    pub first: RecordNumber,
    /// The records; `None`: all of `taken`.
    pub records: Option<&'a [RecordNumber]>,
}

impl CatchUp<'_> {
    pub fn run(self) {
        let rule = self.update.rule;
        rule.visit(self);
    }
}

impl StepVisitor for CatchUp<'_> {
    type Output = ();

    fn visit<S: Step>(self, step: S) {
        let prepare = |scalars: &UpdateScalars| {
            let mut step = step;
            step.prepare(scalars.learning_rate, scalars.step);
            let chance = Chance { seed: self.seed, step: scalars.step as u32 };
            Prepared { step, conditioning: self.update.conditioning(scalars), chance }
        };
        let steps = self.steps.iter().map(prepare).collect();
        match self.format.dim {
            16 => dispatch(Steps::<16, _> { task: self, steps }),
            32 => dispatch(Steps::<32, _> { task: self, steps }),
            64 => dispatch(Steps::<64, _> { task: self, steps }),
            128 => dispatch(Steps::<128, _> { task: self, steps }),
            _ => dispatch(Steps::<0, _> { task: self, steps }),
        }
    }
}

/// A step that records have missed.
struct Prepared<S> {
    step: S,
    conditioning: Conditioning,
    chance: Chance,
}

/// `D`: the dim, or 0 if it is not constant.
struct Steps<'a, const D: usize, S> {
    task: CatchUp<'a>,
    steps: Vec<Prepared<S>>,
}

impl<const D: usize, S: Step> Kernel for Steps<'_, D, S> {
    type Output = ();

    #[allow(unsafe_code)]
    #[inline(always)]
    fn run(self) {
        let Steps { task, steps } = self;
        let CatchUp { arena, format, before, taken, first, records, .. } = task;
        let (num_steps, last) = (steps.len() as u32, first + taken.len() as RecordNumber);
        let (now, addresses) = (before + num_steps, arena.addresses());
        let dim = if D > 0 { D } else { format.dim };
        let (mut values, mut gradient) = (vec![0f32; dim], vec![0f32; dim]);
        let mut catch_up = |number: RecordNumber| {
            let taken = &mut taken[(number - first) as usize];
            let num_missed = (now - std::mem::replace(taken, now)).min(num_steps);
            if num_missed == 0 || number == NO_RECORD {
                return;
            }
            // SAFETY: `taken` is borrowed mutably, so no other thread has these records, and the table is.
            let record = unsafe { arena.record_mut(number) };
            for step in &steps[(num_steps - num_missed) as usize..] {
                gradient.fill(0.0);
                if format.row_type == RowType::Float32 {
                    let (row, states) = record.split_at_mut(dim);
                    update_record::<D, S>(&step.step, &step.conditioning, row, states, &mut gradient);
                } else {
                    format.read_row(record, &mut values);
                    let states = &mut record[format.states_start()..];
                    update_record::<D, S>(&step.step, &step.conditioning, &mut values, states, &mut gradient);
                    format.write_updated(record, &values, &step.chance);
                }
            }
        };
        match records {
            Some(records) => {
                for (place, &record) in records.iter().enumerate() {
                    if let Some(&later) = records.get(place + AHEAD) {
                        let values = addresses.get(later);
                        (0..arena.width()).step_by(16).for_each(|at| prefetch(values.wrapping_add(at)));
                    }
                    catch_up(record);
                }
            }
            None => (first..last).for_each(catch_up),
        }
    }
}
