// Where every dot of the portrait is drawn now. When checkpoint, window or component change, dots travel from where
// they are to where they belong; with reduced motion they are there at once.

const TRAVEL = 750; // milliseconds: long enough to follow one dot, short enough to play ten checkpoints
const HOLD = 450;

function eased(t) {
  return t < 0.5 ? 4 * t ** 3 : 1 - (-2 * t + 2) ** 3 / 2;
}

export class Motion {
  constructor(app) {
    this.app = app;
    const { nHeads } = app.data;
    this.x = new Float64Array(nHeads).fill(NaN); // r_q as drawn
    this.y = new Float64Array(nHeads).fill(NaN); // r_k as drawn
    this.from = { x: this.x.slice(), y: this.y.slice() };
    this.to = { x: this.x.slice(), y: this.y.slice() };
    this.moving = false;
    this.onFrame = () => {};
    this.aim();
    this.jump();
    app.store.subscribe((changed) => {
      if (changed.has("checkpoint") || changed.has("component") || changed.has("choice")) this.start();
      if (changed.has("playing")) this.#schedule();
    });
  }

  // Set the places that the state asks for.
  aim() {
    const { data, store } = this.app;
    const { checkpoint, component, choice } = store.state;
    const start = data.row(checkpoint, component);
    const source = data.choices[choice];
    this.to.x = Float64Array.from(source.r_q.subarray(start, start + data.nHeads));
    this.to.y = Float64Array.from(source.r_k.subarray(start, start + data.nHeads));
  }

  jump() {
    this.x.set(this.to.x);
    this.y.set(this.to.y);
    this.moving = false;
  }

  start() {
    this.from = { x: this.x.slice(), y: this.y.slice() };
    this.aim();
    // The heads of one model are not those of the next: nothing travels between models.
    if (this.app.calm() || !this.app.data.oneRun) {
      this.jump(); // the portrait draws itself again as any view does
      this.#schedule();
      return;
    }
    this.began = performance.now();
    if (!this.moving) {
      this.moving = true;
      requestAnimationFrame((now) => this.#step(now));
    }
  }

  #step(now) {
    if (!this.moving) return;
    const t = Math.min(1, Math.max(0, (now - this.began) / TRAVEL));
    const share = eased(t);
    for (const [shown, from, to] of [[this.x, this.from.x, this.to.x], [this.y, this.from.y, this.to.y]]) {
      for (let h = 0; h < shown.length; h += 1) {
        shown[h] = Number.isFinite(from[h]) && Number.isFinite(to[h]) ? from[h] + (to[h] - from[h]) * share : to[h];
      }
    }
    this.onFrame();
    if (t < 1) requestAnimationFrame((later) => this.#step(later));
    else {
      this.jump();
      this.onFrame();
      this.#schedule();
    }
  }

  // While playing: the next checkpoint after a short rest, and a stop at the end.
  #schedule() {
    clearTimeout(this.timer);
    const { store, selection } = this.app;
    if (!store.state.playing) return;
    this.timer = setTimeout(() => {
      const list = selection.checkpoints();
      const next = list.find((c) => c > store.state.checkpoint);
      if (next === undefined) store.set({ playing: false });
      else store.set({ checkpoint: next });
    }, this.app.calm() ? TRAVEL + HOLD : HOLD);
  }
}
