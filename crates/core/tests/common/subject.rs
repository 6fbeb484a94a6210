//! What is held against the model: a group of tables on the host or on a device, in the calls of a training step.

use std::collections::BTreeMap;
use std::sync::Arc;

use sok_core::contract::binding::{Binding, OwnUpdate, UpdateMode};
use sok_core::contract::gradients::{GradientRows, Keep};
use sok_core::contract::group::Group;
use sok_core::contract::profile::Profile;
use sok_core::contract::table::{Contents, Insertion, Table, TableConfig};
use sok_core::contract::ticket::{Named, TICKET_LEN};
use sok_core::error::Result;
use sok_core::formula::update::{Update, UpdateScalars};
use sok_core::formula::{Adagrad, Formula, Rule};
use sok_core::host::group::{ApplyScalars, HostGroup};
use sok_core::host::push::OutputGradients;
use sok_core::pool::Pool;
use sok_core::row_type::RowType;

use super::general::update_pieces;
use super::input::Input;
use super::unwritten;

/// Gradients of a push, kept alive by whoever holds the `Arc`.
pub type Kept = Arc<Vec<Vec<f32>>>;

/// By number of the push.
pub type Tickets = BTreeMap<u64, Vec<f32>>;

pub trait Subject {
    /// For messages.
    fn name(&self) -> String;

    /// Whether ranks share the tables. Then unknown ids and dropped gradients are counted once a key, and the gradients of weights come
    /// from the rows that the lookup read.
    fn is_sharded(&self) -> bool {
        false
    }

    /// The type of the arrays that it writes rows to and reads gradients from.
    fn array_type(&self) -> RowType {
        RowType::Float32
    }

    /// The lookup's number, and the rows of each feature.
    fn lookup(&mut self, inputs: &[Input], insertion: Insertion, save: bool) -> Result<(u64, Vec<Vec<f32>>)>;

    /// Push number `number`, of the gradients of a lookup's rows, numbers of the arrays' type. `ids`: of each feature that has weights. Gives the gradients of
    /// weights, of each feature that has them.
    fn push(
        &mut self,
        number: u64,
        lookup: u64,
        gradients: &Kept,
        hold: bool,
        ids: &[usize],
    ) -> Result<Vec<Vec<f32>>>;

    /// The ticket of a push.
    fn ticket(&self, number: u64) -> &[f32];

    /// Commits the sum of tickets, each times its weight. Gives the squared norm.
    fn commit(&mut self, named: &[(u64, f32)], is_update: bool) -> Result<f64>;

    /// By the optimizer that is bound, or another one.
    fn apply_by(&mut self, binding: &Binding, update: UpdateScalars, is_update: bool) -> Result<()>;

    fn bind(&mut self, binding: Binding) -> Result<()>;
    fn binding(&self) -> Option<Binding>;
    fn num_tables(&self) -> usize;
    fn table(&mut self, number: usize) -> &dyn Table;
    /// A table whose rows may not have taken all steps yet.
    fn unsettled(&mut self, number: usize) -> &dyn Table {
        self.table(number)
    }
    fn table_mut(&mut self, number: usize) -> &mut dyn Table;
    fn tables(&mut self) -> Vec<&dyn Contents>;
    fn tables_mut(&mut self) -> Vec<&mut dyn Table>;
    fn pending_pushes(&mut self) -> usize;
    fn take_refused(&mut self) -> Vec<(String, u64)>;

    fn measure(&mut self, is_on: bool);
    fn take_profile(&mut self) -> Profile;

    /// Gradients that were held, once nothing is pending.
    fn take_held(&mut self) -> Vec<Kept>;

    fn apply(&mut self, update: UpdateScalars, is_update: bool) -> Result<()> {
        let binding = self.binding().expect("an optimizer is bound");
        self.apply_by(&binding, update, is_update)
    }
}

/// Makes groups that are to be alike.
pub struct Maker {
    pub make: fn(&[TableConfig]) -> Vec<Box<dyn Subject>>,
    /// An id outside a static table is told by the next call.
    pub tells_late: bool,
    /// Dims that stand for all others, where each has to be compiled; empty: none do.
    pub dims: &'static [usize],
    /// Whether steps may update rows without gradients.
    pub has_modes: bool,
}

/// The update mode of a test with this update.
pub fn mode_of(update: &Update, has_modes: bool) -> UpdateMode {
    if !has_modes || update.rule.is_general() {
        return UpdateMode::Local;
    }
    match format!("{update:?}").len() % 4 {
        0 => UpdateMode::Global,
        1 => UpdateMode::LazyGlobal,
        _ => UpdateMode::Local,
    }
}

/// Sum of tickets, each times its weight.
pub fn sum_of_tickets(tickets: &Tickets, named: &[(u64, f32)]) -> Vec<f32> {
    let mut sum = vec![0.0; TICKET_LEN];
    for (number, weight) in named {
        sum.iter_mut().zip(&tickets[number]).for_each(|(s, t)| *s += weight * t);
    }
    sum
}

pub const OWNER: u64 = 1;

/// What the own optimizer of some tables does, which has row 2 of the scalars.
pub const OWN_UPDATE: Update = Update {
    rule: Rule::Adagrad(Adagrad::VARIANTS[0]),
    weight_decay: Some(0.05),
    clipvalue: Some(0.7),
    clipnorm: None,
};

pub fn binding(owner: u64, update: Update) -> Binding {
    Binding { was_restored: was_restored(owner), ..Binding::new(owner, update, update.clipnorm.is_some()) }
}

/// Whether the variables of an optimizer were loaded. In these tests, those of every second one were.
pub fn was_restored(owner: u64) -> bool {
    owner % 2 == 1
}

/// As `binding`, of tables of which some may have an optimizer of their own.
pub fn binding_of<'a>(
    mut configs: impl Iterator<Item = &'a TableConfig>,
    owner: u64,
    update: Update,
    mode: UpdateMode,
) -> Binding {
    let bound = Binding { mode, ..binding(owner, update) };
    if configs.all(|config| config.optimizer == 0) {
        return bound;
    }
    let others = Arc::new([OwnUpdate { update: OWN_UPDATE, row: 2 }]);
    Binding { others, ..bound }
}

/// Returns the scalars of optimizer 1. `update`: those of optimizer 0.
pub fn own_scalars(update: UpdateScalars) -> UpdateScalars {
    UpdateScalars { learning_rate: 0.5 * update.learning_rate, step: update.step + 1, ..update }
}

/// The scalars of all optimizers. Row 1 is of none of them.
pub fn all_scalars(update: UpdateScalars, is_update: bool) -> ApplyScalars {
    let none = UpdateScalars { learning_rate: f32::NAN, step: 1, factor: f32::NAN };
    ApplyScalars { rows: vec![update, none, own_scalars(update)], is_update }
}

/// As [`all_scalars`], as a framework has them.
pub fn scalar_rows(update: UpdateScalars, is_update: bool) -> Vec<f32> {
    let numbers = |row: &UpdateScalars| {
        [row.learning_rate, row.step as f32, f32::from(u8::from(is_update)), row.factor]
    };
    all_scalars(update, is_update).rows.iter().flat_map(numbers).collect()
}

/// A group on the host, and the threads it is to use.
pub struct HostSubject {
    group: HostGroup,
    pool: &'static Pool,
    tickets: Tickets,
    held: Vec<Kept>,
    /// The difference between the group's number of a push and the test's. `None` before the first commit.
    above: Option<u64>,
}

impl HostSubject {
    pub fn new(configs: &[TableConfig], pool: &'static Pool) -> HostSubject {
        let group = HostGroup::new(configs.to_vec()).unwrap();
        HostSubject { group, pool, tickets: BTreeMap::new(), held: Vec::new(), above: None }
    }
}

pub fn lend(gradients: &Kept) -> Vec<GradientRows> {
    // SAFETY: nobody writes to them; they live until the call returns, or as the `Keep` that `push` makes of them.
    gradients.iter().map(|g| unsafe { GradientRows::new(g.as_ptr(), g.len()) }).collect()
}

impl Subject for HostSubject {
    fn name(&self) -> String {
        format!("{} threads", self.pool.threads())
    }

    fn lookup(&mut self, inputs: &[Input], insertion: Insertion, save: bool) -> Result<(u64, Vec<Vec<f32>>)> {
        let dim = |table: usize| self.group.table(table).config().dim;
        let mut outputs: Vec<Vec<f32>> =
            inputs.iter().map(|i| unwritten(i.bags().len() * dim(i.table))).collect();
        let features: Vec<_> = inputs.iter().map(Input::feature).collect();
        let room = outputs.iter_mut().map(|o| &mut o[..]).collect();
        let number = self.group.lookup(&features, insertion, save, room, self.pool)?;
        Ok((number, outputs))
    }

    fn push(
        &mut self,
        number: u64,
        lookup: u64,
        gradients: &Kept,
        hold: bool,
        ids: &[usize],
    ) -> Result<Vec<Vec<f32>>> {
        let mut weights: Vec<Vec<f32>> = ids.iter().map(|n| unwritten(*n)).collect();
        let mut ticket = unwritten(TICKET_LEN);
        let room = weights.iter_mut().map(|w| &mut w[..]).collect();
        let keep = hold.then(|| Box::new(gradients.clone()) as Keep);
        let output = OutputGradients { rows: lend(gradients), keep, check_finite: true };
        self.group.push(lookup, output, room, &mut ticket, self.pool)?;
        self.tickets.insert(number, ticket);
        if hold {
            self.held.push(gradients.clone());
        }
        Ok(weights)
    }

    fn ticket(&self, number: u64) -> &[f32] {
        &self.tickets[&number]
    }

    fn commit(&mut self, named: &[(u64, f32)], is_update: bool) -> Result<f64> {
        let resolved = self.group.resolve(&sum_of_tickets(&self.tickets, named))?;
        if let (Some(first), Some(&(number, _))) = (resolved.first(), named.first()) {
            self.above.get_or_insert(first.number - number);
        }
        let number_of = |number: u64| number + self.above.unwrap_or(0);
        let expected = named.iter().map(|&(number, weight)| Named { number: number_of(number), weight });
        assert_eq!(resolved, expected.collect::<Vec<_>>());
        self.group.check_absent(&resolved)?;
        self.group.commit(&resolved, is_update, self.pool)
    }

    fn apply_by(&mut self, binding: &Binding, update: UpdateScalars, is_update: bool) -> Result<()> {
        if binding.update.rule.is_general() && is_update {
            let scalars = scalar_rows(update, true);
            // A size that cuts rows, and one for all of them.
            let size = if self.pool.threads() > 1 { 37 } else { 1 << 16 };
            update_pieces(&mut self.group, binding, &scalars, size)?;
        }
        self.group.apply(binding, &all_scalars(update, is_update), self.pool)
    }

    fn bind(&mut self, binding: Binding) -> Result<()> {
        self.group.bind(binding)
    }

    fn binding(&self) -> Option<Binding> {
        self.group.binding().cloned()
    }

    fn num_tables(&self) -> usize {
        self.group.num_tables()
    }

    fn table(&mut self, number: usize) -> &dyn Table {
        self.group.settle_tables();
        self.group.table(number)
    }

    fn unsettled(&mut self, number: usize) -> &dyn Table {
        self.group.table(number)
    }

    fn table_mut(&mut self, number: usize) -> &mut dyn Table {
        self.group.table_mut(number)
    }

    fn tables(&mut self) -> Vec<&dyn Contents> {
        self.group.settle_tables();
        (0..self.group.num_tables()).map(|number| self.group.table(number) as &dyn Contents).collect()
    }

    fn tables_mut(&mut self) -> Vec<&mut dyn Table> {
        self.group.tables_mut()
    }

    fn pending_pushes(&mut self) -> usize {
        self.group.pending_pushes(true).unwrap()
    }

    fn measure(&mut self, is_on: bool) {
        self.group.measure(is_on);
    }

    fn take_profile(&mut self) -> Profile {
        self.group.take_profile().unwrap()
    }

    fn take_refused(&mut self) -> Vec<(String, u64)> {
        self.group.take_refused()
    }

    fn take_held(&mut self) -> Vec<Kept> {
        std::mem::take(&mut self.held)
    }
}
