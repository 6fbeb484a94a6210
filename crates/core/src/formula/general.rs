//! An optimizer that has no formula here: its own code computes the step, on arrays of the framework. The core keeps its states.

use std::sync::{Mutex, PoisonError};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::step::{Formula, MAX_SCALARS, MAX_STATES, StateSpec, Step, StepVisitor};
use crate::error::{Error, Result};

/// What the core knows of an optimizer that computes each element of a variable by itself: its class, and its states.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(into = "Description")]
pub struct General {
    /// The name under which Keras registers the class. Optimizers of different classes have different states.
    pub class: &'static str,
    /// Each is as wide as the row.
    pub states: &'static [GeneralState],
}

/// A state of each element of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GeneralState {
    /// As Keras names the variable.
    pub name: &'static str,
    /// The first value.
    pub initial: f32,
}

/// A [`General`] in configurations and dumps.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    class: String,
    states: Vec<StateDescription>,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StateDescription {
    name: String,
    initial: f32,
}

impl From<General> for Description {
    fn from(general: General) -> Description {
        let states = general.states.iter();
        let states = states.map(|state| StateDescription { name: state.name.into(), initial: state.initial });
        Description { class: general.class.into(), states: states.collect() }
    }
}

// Not derived, which would ask for a text that lives as long as the fields.
impl<'de> Deserialize<'de> for General {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<General, D::Error> {
        let description = Description::deserialize(deserializer)?;
        description.check().map_err(D::Error::custom)?;
        Ok(description.interned())
    }
}

impl Description {
    fn check(&self) -> Result<()> {
        if self.class.is_empty() {
            return Err(Error::argument("`class` must not be empty"));
        }
        for (place, StateDescription { name, initial }) in self.states.iter().enumerate() {
            let is_used = name == "row" || self.states[..place].iter().any(|other| other.name == *name);
            if name.is_empty() || is_used {
                let rule = "the states of an optimizer must have names of their own";
                return Err(Error::argument(format!("{rule}. Received: `{name}`")));
            }
            if !initial.is_finite() {
                let rule = format!("the first value of state `{name}` must be finite");
                return Err(Error::argument(format!("{rule}. Received: {initial}")));
            }
        }
        Ok(())
    }

    fn is_of(&self, general: &General) -> bool {
        let is_same = |(one, other): (&StateDescription, &GeneralState)| {
            one.name == other.name && one.initial.to_bits() == other.initial.to_bits()
        };
        self.class == general.class
            && self.states.len() == general.states.len()
            && self.states.iter().zip(general.states).all(is_same)
    }

    /// Rules are copied in each step, so their names live as long as the process. It has as many as there are optimizers.
    fn interned(self) -> General {
        static KNOWN: Mutex<Vec<General>> = Mutex::new(Vec::new());
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(general) = known.iter().find(|general| self.is_of(general)) {
            return *general;
        }
        let state = |StateDescription { name, initial }| GeneralState { name: name.leak(), initial };
        let states: Vec<GeneralState> = self.states.into_iter().map(state).collect();
        let general = General { class: self.class.leak(), states: states.leak() };
        known.push(general);
        general
    }
}

/// The step type in the CUDA header, for kernels that prepare the scalars of any rule.
pub(super) const CUDA: &str = "\
struct GeneralStep {
  static __device__ __forceinline__ void prepare(float*, float, u64) {}
};
";

impl Formula for General {
    // No device has a loop for it.
    const VARIANTS: &'static [General] = &[];

    fn validate(&self) -> Result<()> {
        Description::from(*self).check()
    }

    fn visit<V: StepVisitor>(&self, visitor: V) -> V::Output {
        visitor.visit(GeneralStep { states: self.states })
    }
}

/// Stands for a step that the core does not make. It changes nothing: the update of a group gathers and scatters records instead.
#[derive(Clone, Copy)]
struct GeneralStep {
    states: &'static [GeneralState],
}

impl Step for GeneralStep {
    const STATES: usize = 0;
    const REDUCES: bool = false;
    const DIRECTS: bool = false;

    fn device_type() -> String {
        "GeneralStep".into()
    }

    fn scalars(&self) -> [f32; MAX_SCALARS] {
        [0.0; MAX_SCALARS]
    }

    fn states(&self, dim: usize) -> Vec<StateSpec> {
        let spec = |state: &GeneralState| StateSpec { name: state.name, width: dim, initial: state.initial };
        self.states.iter().map(spec).collect()
    }

    fn prepare(&mut self, _learning_rate: f32, _count: u64) {}

    fn reduce(&self, _state: &mut f32, _mean_of_squares: f32) -> f32 {
        0.0
    }

    fn direct(&self, _states: &mut [f32; MAX_STATES], gradient: f32) -> f32 {
        gradient
    }

    fn ratio(&self, _of_row: f32, _of_direction: f32) -> f32 {
        1.0
    }

    fn step(&self, x: f32, _states: &mut [f32; MAX_STATES], _gradient: f32, _reduced: f32) -> f32 {
        x
    }
}

#[cfg(test)]
mod tests {
    use crate::formula::Rule;

    #[test]
    fn a_rule_is_the_same_after_json_and_has_its_states() {
        let text = r#"{"name":"general","class":"user>Heavy","states":[{"name":"momentum","initial":0.0},{"name":"sum","initial":0.25}]}"#;
        let rule: Rule = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&rule).unwrap(), text);
        assert_eq!(serde_json::from_str::<Rule>(text).unwrap(), rule);
        assert_eq!(rule.name(), "user>Heavy");
        let states: Vec<_> = rule.states(3).into_iter().map(|s| (s.name, s.width, s.initial)).collect();
        assert_eq!(states, [("momentum", 3, 0.0), ("sum", 3, 0.25)]);
    }

    #[test]
    fn states_need_names_of_their_own_and_finite_values() {
        let error = |states: &str| {
            let text = format!(r#"{{"name":"general","class":"a","states":[{states}]}}"#);
            serde_json::from_str::<Rule>(&text).unwrap_err().to_string()
        };
        let twice = r#"{"name":"m","initial":0.0},{"name":"m","initial":0.0}"#;
        assert!(error(twice).contains("must have names of their own. Received: `m`"));
        assert!(error(r#"{"name":"row","initial":0.0}"#).contains("Received: `row`"));
        assert!(error(r#"{"name":"m","initial":1e300}"#).contains("must be finite"));
    }
}
