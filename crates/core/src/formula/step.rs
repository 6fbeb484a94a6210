//! What a formula is: hyper-parameters, and the step that they make.

use crate::error::Result;

/// States of a column at most.
pub const MAX_STATES: usize = 3;
/// Scalars of a step at most.
pub const MAX_SCALARS: usize = 8;

/// A state of an optimizer in every record.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateSpec {
    /// As Keras names the variable.
    pub name: &'static str,
    /// Floats in a record: the dim of the table, or 1 for a state of the whole row.
    pub width: usize,
    /// The first value of each float.
    pub initial: f32,
}

/// The hyper-parameters of an optimizer, named as in Keras and as wide as Python's floats.
pub trait Formula: Sized + 'static {
    /// Hyper-parameters that reach each type of step, one after the other. Tests run all of them.
    const VARIANTS: &'static [Self];

    /// # Errors
    /// [`Error::Argument`] that names the hyper-parameter, the rule and the value.
    fn validate(&self) -> Result<()>;

    /// Calls `visitor` with the step of these hyper-parameters. It is not prepared yet.
    fn visit<V: StepVisitor>(&self, visitor: V) -> V::Output;
}

/// A formula with its hyper-parameters as float32, ready for one step of training after [`prepare`](Step::prepare).
///
/// Steps are plain arithmetic without branches on data, so that a loop over columns compiles to vector code.
pub trait Step: Copy + Send + Sync {
    /// How many states a column has, each as wide as the row.
    const STATES: usize;

    /// Whether the columns of a row depend on each other: `reduce` goes over the row first. Such a record ends in one more float, the
    /// state of the whole row.
    const REDUCES: bool;

    /// Whether the columns of a row depend on each other in another way: `direct` goes over the row first, then `ratio` compares the row
    /// with what that has made of its gradient.
    const DIRECTS: bool;

    /// The type in the CUDA header with its template arguments.
    fn device_type() -> String;

    /// The scalars in the order in which the CUDA header has them.
    fn scalars(&self) -> [f32; MAX_SCALARS];

    /// The states that follow the row in a record of a table of `dim`.
    fn states(&self, dim: usize) -> Vec<StateSpec>;

    /// Computes the scalars that depend on the learning rate, and on the 1-based count of updates.
    fn prepare(&mut self, learning_rate: f32, count: u64);

    /// Updates the state of a row from the mean of the squares of its gradient. Returns what `step` takes as `reduced`.
    fn reduce(&self, state: &mut f32, mean_of_squares: f32) -> f32;

    /// Makes a direction of a column's gradient, and updates its states. `step` takes it as the gradient, and leaves the states.
    fn direct(&self, states: &mut [f32; MAX_STATES], gradient: f32) -> f32;

    /// Returns what `step` takes as `reduced`, from the sums of the squares of a row's values and of its directions.
    fn ratio(&self, of_row: f32, of_direction: f32) -> f32;

    /// The new value of a column, from its value `x`, its states, and the merged and conditioned gradient.
    fn step(&self, x: f32, states: &mut [f32; MAX_STATES], gradient: f32, reduced: f32) -> f32;
}

/// A loop over records that is compiled once for each step.
pub trait StepVisitor {
    /// What the loop returns.
    type Output;

    /// Runs the loop with a step.
    fn visit<S: Step>(self, step: S) -> Self::Output;
}
