//! The optimizers of a group of tables.

use std::sync::Arc;

use crate::contract::record::RecordLayout;
use crate::contract::table::{Table, TableConfig};
use crate::error::{Error, Result};
use crate::formula::update::Update;

/// The optimizers that update the tables of a group. Each table names one of them by [`TableConfig::optimizer`].
#[derive(Clone, Debug, PartialEq)]
pub struct Binding {
    /// Identifies the model's optimizer.
    pub owner: u64,
    /// What the model's optimizer does to gradients and records.
    pub update: Update,
    /// What the others do, from optimizer 1 on.
    pub others: Arc<[OwnUpdate]>,
    /// Whether `commit` computes the squared norm of all gradients of the model's optimizer.
    pub needs_norm: bool,
    /// Which rows a step updates.
    pub mode: UpdateMode,
    /// Whether the variables of the optimizer were loaded. If so, it keeps the states of rows that were loaded too.
    pub was_restored: bool,
}

/// Which rows a step of an optimizer updates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpdateMode {
    /// Those with gradients.
    #[default]
    Local,
    /// All. A row without a gradient takes the step with a gradient of zero, as a dense variable does.
    Global,
    /// As `Global`. A row takes the steps that it has missed when it is read next.
    LazyGlobal,
}

/// What the optimizer of some tables does to gradients and records.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OwnUpdate {
    /// The update, which has a formula.
    pub update: Update,
    /// Its row in the scalars of an apply.
    pub row: usize,
}

impl Binding {
    /// Returns the binding of an optimizer for all tables.
    pub fn new(owner: u64, update: Update, needs_norm: bool) -> Binding {
        Binding {
            owner,
            update,
            others: Arc::new([]),
            needs_norm,
            mode: UpdateMode::Local,
            was_restored: false,
        }
    }

    /// Returns the update of each optimizer.
    pub fn updates(&self) -> impl Iterator<Item = &Update> {
        std::iter::once(&self.update).chain(self.others.iter().map(|own| &own.update))
    }

    /// Returns the update of an optimizer. The group must have it, as [`Group::bind`](super::group::Group::bind) checks.
    pub fn update_by(&self, optimizer: usize) -> &Update {
        optimizer.checked_sub(1).map_or(&self.update, |other| &self.others[other].update)
    }

    /// Returns the update of a table.
    pub fn update_of(&self, config: &TableConfig) -> &Update {
        self.update_by(config.optimizer)
    }

    /// Returns the row of an optimizer in the scalars of an apply.
    pub fn row_of(&self, optimizer: usize) -> usize {
        optimizer.checked_sub(1).map_or(0, |other| self.others[other].row)
    }

    /// Whether gradients are clipped by the norm of their table, in some tables.
    pub fn clips_norms(&self) -> bool {
        self.updates().any(|update| update.clipnorm.is_some())
    }

    /// Checks that scalars have a row for each optimizer.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub fn check_rows(&self, num_rows: usize) -> Result<()> {
        match self.others.iter().find(|own| own.row >= num_rows) {
            None => Ok(()),
            Some(own) => Err(Error::argument(format!(
                "apply takes four scalars for each optimizer. Received: {num_rows} rows, of which row {} is missing",
                own.row
            ))),
        }
    }

    /// Returns the binding of tables that were `bound` to another optimizer or to none, and whether the states of their records
    /// stay.
    ///
    /// # Errors
    /// [`Error::Argument`] for an invalid update.
    pub fn after(self, bound: Option<&Binding>) -> Result<(Binding, bool)> {
        self.updates().try_for_each(Update::validate)?;
        if let Some(own) = self.others.iter().find(|own| own.update.rule.is_general()) {
            let name = own.update.rule.name();
            return Err(Error::argument(format!(
                "the core has no formula of {name}, the optimizer of some tables"
            )));
        }
        if self.mode != UpdateMode::Local && self.update.rule.is_general() {
            let name = self.update.rule.name();
            return Err(Error::argument(format!(
                "`update_mode` needs an optimizer whose formula the core has. Received: {name}"
            )));
        }
        let needs_norm = self.needs_norm || self.clips_norms();
        let keeps_states = bound.is_none_or(|b| b.owner == self.owner) || self.is_stateless();
        Ok((Binding { needs_norm, ..self }, keeps_states))
    }

    fn is_stateless(&self) -> bool {
        self.updates().all(|update| update.rule.states(1).is_empty())
    }
}

/// Checks that an optimizer may update tables whose binding is `bound`.
///
/// # Errors
/// [`Error::State`] if no optimizer or another one is bound, or if the records were replaced and have no states of this one.
pub fn check_owner<'a>(
    bound: Option<&Binding>,
    binding: &Binding,
    tables: impl Iterator<Item = &'a dyn Table> + Clone,
) -> Result<()> {
    let Some(bound) = bound else {
        return Err(Error::State("no optimizer is bound to these tables".into()));
    };
    if bound.owner != binding.owner && !(bound.is_stateless() && binding.is_stateless()) {
        let names = tables.map(|t| format!("`{}`", t.config().name)).collect::<Vec<_>>().join(", ");
        return Err(Error::State(format!(
            "the tables {names} have been bound to another optimizer since, whose states are in their records. \
             Two optimizers can only share tables if both keep no states, as SGD without momentum"
        )));
    }
    let expected_of = |table: &dyn Table| binding.update_of(table.config());
    let has_states = |table: &&dyn Table| {
        let expected = expected_of(*table);
        table.update_rule().is_some_and(|update| {
            // Every step comes here for every table, so the common case is decided without a layout.
            update == expected
                || (update.rule.name() == expected.rule.name()
                    && table.layout() == RecordLayout::new(table.config().dim, Some(expected)))
        })
    };
    let mut tables = tables;
    match tables.find(|table| !has_states(table)) {
        None => Ok(()),
        Some(table) => Err(Error::State(format!(
            "the records of table `{}` have no states of {}, the optimizer that is bound to it: they were replaced since",
            table.config().name,
            expected_of(table).rule.name()
        ))),
    }
}
