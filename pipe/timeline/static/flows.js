// Who fed an action, and whom does it feed? Arrows from each send to the receive that took its value.
//
// A transfer is known by (replica, value, source stage, destination stage, microbatch). It leaves the source's
// row at the time in `sends.left` and arrives in the destination's row when the wait for it ends, or, where the
// rank did not wait, when the action that takes it begins.

const CARRIERS = { a: "F", g: "BI" }; // who makes and takes activations, and gradients

// The arrows at an event: [{from: {member, time, event}, to: {...}, value, into}], `into`: it feeds the event.
export function flowsOf(trace, member, event) {
  const letter = member.kind[event];
  const stage = member.stage[event],
    microbatch = member.microbatch[event];
  const transfers = transfersOf(trace).filter(
    (one) => one.replica === member.replica && one.microbatch === microbatch,
  );
  const touching = (value, isSource) =>
    transfers.filter((one) => one.value === value && (isSource ? one.source : one.destination) === stage);
  if (letter === "r") return drawn(trace, touching(member.value[event], false), true, member.peer[event]);
  if (letter === "s") return drawn(trace, touching(member.value[event], true), false, member.peer[event]);
  const value = Object.keys(CARRIERS).find((one) => CARRIERS[one].includes(letter));
  if (!value) return [];
  return [...drawn(trace, touching(value, false), true), ...drawn(trace, touching(value, true), false)];
}

// With a `peer`, only transfers whose other end is on that rank.
function drawn(trace, transfers, into, peer = -1) {
  return transfers.flatMap((one) => {
    const rank = trace.header.placement[into ? one.source : one.destination];
    if (peer >= 0 && rank !== peer) return [];
    const from = { member: memberOf(trace, one.source, one.replica), time: one.left };
    const to = { member: memberOf(trace, one.destination, one.replica) };
    from.event = eventOf(from.member, CARRIERS[one.value], one.source, one.microbatch);
    to.event = eventOf(to.member, CARRIERS[one.value], one.destination, one.microbatch);
    to.time = arrival(to.member, one) ?? to.member.start[to.event];
    return to.time === undefined ? [] : [{ from, to, value: one.value, into }];
  });
}

function arrival(member, one) {
  const event = eventOf(member, "r", one.destination, one.microbatch, one.value);
  return event < 0 ? undefined : member.end[event];
}

function memberOf(trace, stage, replica) {
  const rank = trace.header.placement[stage];
  return trace.members.find((member) => member.rank === rank && member.replica === replica);
}

// Found through an index of the member's events, made when first asked for.
function eventOf(member, letters, stage, microbatch, value = "-") {
  if (!member.byAction) {
    member.byAction = new Map();
    for (let event = 0; event < member.kind.length; event++) {
      const key = [member.kind[event], member.stage[event], member.microbatch[event], member.value[event]];
      member.byAction.set(key.join(), event);
    }
  }
  for (const letter of letters) {
    const event = member.byAction.get([letter, stage, microbatch, value].join());
    if (event !== undefined) return event;
  }
  return -1;
}

function transfersOf(trace) {
  if (!trace.transfers) {
    trace.transfers = trace.members.flatMap(({ replica, sends }) =>
      sends.left.map((left, at) => ({
        replica,
        left,
        value: sends.value[at],
        source: sends.source[at],
        destination: sends.destination[at],
        microbatch: sends.microbatch[at],
      })),
    );
  }
  return trace.transfers;
}
